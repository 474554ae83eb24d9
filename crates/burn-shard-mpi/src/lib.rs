//! MPI as a transport of process groups.
