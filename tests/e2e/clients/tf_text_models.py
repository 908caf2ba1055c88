"""Writes a SavedModel with operations of tensorflow-text: FOLDER/NAME/VERSION/….

python tf_text_models.py FOLDER NAME
"""

import sys

import tensorflow as tf
import tensorflow_text as text
import tf_models
from tf_models import save, signature, v1, writes


@writes
def text_operations(folder):
    """A signature for each operation."""
    whitespace = text.WhitespaceTokenizer()
    makers = {
        "whitespace": lambda x: whitespace.tokenize(x).to_tensor(),
        "split": lambda x: text.regex_split(x, "-").to_tensor(),
        "fold": text.case_fold_utf8,
        "normalize": lambda x: text.normalize_utf8(x, "NFKC"),
    }

    def build():
        x = v1.placeholder(tf.string, [None], name="x")
        return {name: signature({"x": x}, {"y": make(x)}) for name, make in makers.items()}

    save(folder / "1", build)


if __name__ == "__main__":
    tf_models.main(*sys.argv[1:])
