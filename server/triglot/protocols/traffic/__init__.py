"""How calls are divided among versions, and copied to shadows: what no protocol has, for all of them."""
