"""From stored chunks to checked rows, and what chunks say of the rows in them."""
