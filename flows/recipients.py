"""Says whom an automation tells: the notification block that an alert names, or nobody."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import ActionTypes, ChangeFlowRunState, DoNothing, SendNotification
from prefect.exceptions import ObjectNotFound

from recpoint.errors import SettingsError

__all__ = [
    "kept_actions",
    "notification",
    "recipients_text",
    "require_block_name",
]


#: In place of a block's name: an alert is only to be seen in Prefect's event feed.
NOBODY: Final = "none"


def require_block_name(notify: str) -> None:
    """Refuse what cannot be the name of a block.

    Raises:
        SettingsError: it is neither `type/name` nor `none`.
    """
    if notify != NOBODY and len(_parts(notify)) != 2:
        raise SettingsError(
            "notify",
            found=notify,
            expected=f"type/name of a notification block, or {NOBODY}",
            next_step="prefect block ls",
        )


def notification(client: SyncPrefectClient, notify: str) -> ActionTypes:
    """The action that tells the block of that name, `type/name`; or nobody, by `none`.

    Raises:
        SettingsError: the server has no such block.
    """
    if notify == NOBODY:
        return DoNothing()
    kind, name = _parts(notify)
    try:
        block = client.read_block_document_by_name(name, kind)
    except ObjectNotFound:
        raise SettingsError(
            "notify",
            found=f"no block {notify}",
            expected="a notification block that the server has",
            next_step="prefect block ls",
        ) from None
    assert block.id is not None  # what a server has got has one
    return SendNotification(
        block_document_id=block.id,
        subject="recpoint: {{ automation.name }}",
        body="{{ automation.description }}\n\n"
        "run: {{ event.resource['prefect.resource.name'] }}\n"
        "last event: {{ event.event }} of {{ event.occurred }}\n{{ event.payload }}",
    )


def kept_actions(actions: Iterable[ActionTypes]) -> list[ActionTypes]:
    """Those of an automation that tell somebody, whoever added them."""
    return [action for action in actions if not isinstance(action, ChangeFlowRunState)] or [
        DoNothing()
    ]


def recipients_text(client: SyncPrefectClient, actions: Iterable[ActionTypes]) -> str:
    """In words: the names of blocks, what else is done, or `nobody`."""
    words = []
    for action in kept_actions(actions):
        if isinstance(action, SendNotification):
            try:
                block = client.read_block_document(action.block_document_id)
            except ObjectNotFound:
                words.append("a block that is gone")
                continue
            kind = block.block_type.slug if block.block_type is not None else "block"
            words.append(f"{kind}/{block.name}")
        elif not isinstance(action, DoNothing):
            words.append(action.type)
    return ", ".join(words) or "nobody"


def _parts(notify: str) -> list[str]:
    return [part for part in notify.split("/") if part]
