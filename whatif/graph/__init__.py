"""The task graph: the one data type, its columns, selection and edits."""
