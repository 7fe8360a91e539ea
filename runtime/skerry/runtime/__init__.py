"""What runs inside a replica: the log in the bucket, the exchange of pseudo-gradients, torchft's manager over them."""
