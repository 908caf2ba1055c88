from .double import twice as twice
