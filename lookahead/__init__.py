"""What the batches that are read ahead say about rows: which is final when, and which is needed.

In: the rows that each coming batch looks up. Out: plans.

`plan.py` plans the copies of a checkpoint. Such a plan is a hint. It says which rows can be copied
early, and the marks say which rows have to be copied. `oracle.py` plans a cache: which rows lie in
which slots when a batch is trained. Such a plan is exact, because training looks rows up there.
`shared_oracle.py` plans the caches of several trainers: which has a row, and which borrow it.
`owned_rows.py` divides the ids of a batch among the ranks that store its rows.
"""
