def same(values):
    return values
