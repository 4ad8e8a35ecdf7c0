"""Where objects lie, local or in S3: one contract, and what is built on it alone."""
