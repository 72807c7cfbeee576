// The saved-tensor hooks of an activation checkpoint, and the placeholders in forward's graph for the tensors it does not save.
#pragma once

#include <Python.h>

namespace ckptkern {

// Adds to `module` the types
//   SavedTensors  base class of a segment. pack(x) -> Placeholder is forward's pack hook; it notes x's metadata, and the
//                 version of the parameter that x is or views
//   Recompute     (segment, key, stop). pack(x) is recompute's pack hook: it hands x to the placeholder at the same place,
//                 and raises `stop` at the last one if the region stops early
//   Placeholder   take(key) -> the recomputed tensor, once
// and the function unpack_saved(placeholder), forward's unpack hook, which calls segment.unpack(placeholder) if the
// tensor is not recomputed yet. Returns false, with a Python error set, on failure.
//
// These are plain CPython types because they run once per saved tensor and pass: a call costs 0.1 us, in Python 1 to 2 us.
bool add_saved_tensors(PyObject* module);

} // namespace ckptkern
