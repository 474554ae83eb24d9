//! The tests of this folder as one program; `scripts/gpu-check.sh` runs those that need a GPU.

#[path = "../adam.rs"]
mod adam;
#[path = "../norm.rs"]
mod norm;
#[path = "../pack.rs"]
mod pack;
#[path = "../sgd.rs"]
mod sgd;
