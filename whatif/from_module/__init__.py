"""A step as operators that nobody ran: from a module, an execution trace or an ONNX file, to a task graph."""
