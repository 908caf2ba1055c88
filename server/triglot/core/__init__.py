"""Values and rules that every layer shares; knows numpy and the standard library only."""
