"""The queue's SQL, one file a concern. The one feature of the store that the others may use."""
