"""What fits recpoint into other libraries, each of which is an optional extra."""
