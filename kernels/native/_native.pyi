from collections.abc import Callable, Mapping

#: name of an instruction set -> name of a function -> the function
instruction_sets: Mapping[str, Mapping[str, Callable[..., int | None]]]
sources: str
compiler: str
