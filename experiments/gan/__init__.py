"""A generative adversarial network for handwritten digits: two learners that train in
turn.
"""
