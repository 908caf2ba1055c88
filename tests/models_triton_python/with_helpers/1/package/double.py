def twice(values):
    return values * 2
