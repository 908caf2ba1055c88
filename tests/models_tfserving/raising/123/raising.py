"""A custom prediction routine whose every prediction fails."""


class Raising:
    @classmethod
    def from_path(cls, model_dir):
        return cls()

    def predict(self, instances, **kwargs):
        raise ValueError(f"cannot predict {len(instances)} instances")
