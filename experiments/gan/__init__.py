"""A generative adversarial network of handwritten digits: two learners in turn."""
