"""SQL of the queue, one file for each subject. Other features of the store may import it; it imports none of them."""
