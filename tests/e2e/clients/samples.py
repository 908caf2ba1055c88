"""One tensor for each datatype, with the values that are the first to break."""

import numpy as np

NAN, INF = float("nan"), float("inf")


def _bounds(dtype):
    info = np.iinfo(dtype)
    return np.array([[info.min, info.min + 1, 0], [1, info.max - 1, info.max]], dtype=dtype)


def _floats(dtype, smallest, largest):
    return np.array([[NAN, INF, -INF, 0.0], [-0.0, 0.1, smallest, largest]], dtype=dtype)


def strings(*rows):
    """An object array of the rows; numpy's own string types would cut trailing zeros off."""
    array = np.empty((len(rows), len(rows[0])), dtype=object)
    for at, row in enumerate(rows):
        array[at] = row
    return array


def sample(datatype):
    """A tensor of rank 2."""
    if datatype == "BYTES":
        return strings([b"", b"text", b"\xff\xfe\x80"], [b"ends with zero\x00", "Grüße, 世界".encode(), b""])
    if datatype == "BF16":
        import ml_dtypes  # noqa: PLC0415 - not every environment has it

        return _floats(ml_dtypes.bfloat16, 9.2e-41, 3.3895314e38)
    floats = {"FP16": (np.float16, 6e-8, 65504), "FP32": (np.float32, 1e-45, 3.4028235e38)}
    floats["FP64"] = (np.float64, 5e-324, 1.7976931348623157e308)
    if datatype in floats:
        return _floats(*floats[datatype])
    if datatype == "BOOL":
        return np.array([[True, False], [False, True]])
    return _bounds(getattr(np, datatype.lower()))


def text_sample():
    """A BYTES tensor that JSON can carry."""
    return strings([b"", b'quote " and \\'], ["Grüße, 世界 🙂".encode(), b"line\nbreak"])


def assert_same(got, sent):
    """The same dtype, shape and bits (BYTES: elements)."""
    assert got is not None, "no such output"
    assert got.dtype == sent.dtype, f"dtype {got.dtype}, expected {sent.dtype}"
    assert got.shape == sent.shape, f"shape {got.shape}, expected {sent.shape}"
    if sent.dtype == object:
        assert got.tolist() == sent.tolist(), f"{got.tolist()}, expected {sent.tolist()}"
    else:
        assert got.tobytes() == sent.tobytes(), f"{got.tolist()}, expected {sent.tolist()}"
