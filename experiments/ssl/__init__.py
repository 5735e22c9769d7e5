"""Features of handwritten digits that are learnt without their labels, and a linear classifier of them."""
