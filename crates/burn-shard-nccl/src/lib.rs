//! NCCL as a communicator of process groups.
