"""The composition root: the only room that knows every service, and the owner of the life of a sample."""
