//! Faults that wait for their communicator.

use parking_lot::Mutex;

#[derive(Clone, Copy)]
pub(crate) struct Planned {
    rank: i32,
    pub(crate) op: u64,
    pub(crate) kind: i32,
}

static PLANNED: Mutex<Vec<Planned>> = Mutex::new(Vec::new());

pub(crate) fn plan(rank: i32, op: u64, kind: i32) {
    PLANNED.lock().push(Planned { rank, op, kind });
}

/// The fault of the communicator that `rank` makes now, if one is planned.
pub(crate) fn take(rank: i32) -> Option<Planned> {
    let mut planned = PLANNED.lock();
    let index = planned.iter().position(|fault| fault.rank == rank)?;
    Some(planned.remove(index))
}
