"""What the batches that are read ahead say about rows: which row is final when.

In: the rows that each coming batch looks up. Out: plans. A plan is a hint. It says which rows can
be copied early, and the marks say which rows have to be copied. Read `plan.py`.
"""
