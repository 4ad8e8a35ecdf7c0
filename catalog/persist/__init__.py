"""Turns a staged job into a committed checkpoint.

Its input is a job file, its output a manifest in the store. Read the modules in this order:
`persist` (runs the steps, for a flow and for an agent without Prefect), `plan` (divides the job
into chunks), `quantize` (with `residuals`, `base_cache`, `quantizer_choice`, `row_widths`,
`residual_price`, `priced_codes`, `first_rows`, `block_rows`, `block_codes` and `staged_codes`),
`encode` (recipes of chunks), `upload` (chunks in the store), `spool` (the files between the steps),
`ranks` (joins the parts of several ranks to one checkpoint), `record_sizes` (estimates the sizes of
records before a job is staged).
"""
