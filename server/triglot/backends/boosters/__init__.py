"""Models of gradient boosting libraries: of files of their own, by the backends of their names, and pickled."""
