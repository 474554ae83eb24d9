//! Starts one process per rank, and ends them together.
