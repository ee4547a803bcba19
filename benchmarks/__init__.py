"""Measurements of this project's own speed and robustness, each a make target.

Belongs here: timing of the optimizer, the loop and the engines, and killing runs on
purpose. They may import everything; nothing imports them.
"""
