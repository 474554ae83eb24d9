//! Sub-groups: each has an NCCL communicator of its own, beside a sub-group of the control group.
//!
//! They share the stream, so that what a rank starts in several groups runs in the order in which it was started:
//! kernels of two communicators that waited for each other's ranks at once could wait forever. The communicator is
//! made from an id of its own and not by `ncclCommSplit`, which wants nothing in flight in the group that is split,
//! and a call of ranks that are in no sub-group.

use std::sync::{Arc, mpsc};

use burn_shard_comm::{Caller, Communicator, Error, Members, ProcessGroup, TrafficCounter};

use crate::{
    api::UniqueId,
    comm::Comm,
    communicator::{NcclCommunicator, joined},
    error::NcclError,
    in_flight::{Name, watch},
    numbers::Numbers,
};

impl NcclCommunicator {
    /// This rank of the sub-group of `color`, if it has one.
    pub(crate) fn sub_group(
        &self,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Self>, Error> {
        let link = &self.link;
        let (name, control) = self.split_control(color, key)?;
        let Some(control) = control else {
            return Ok(None);
        };
        let (sender, receiver) = mpsc::channel();
        let group = ProcessGroup::new(Arc::clone(&control));
        let watched = watch(control.members().root_rank(), receiver);
        let comm = watched
            .map_err(|error| NcclError::Thread {
                message: error.to_string(),
            })
            .and_then(|_thread| self.joined_by(&group));
        let comm = comm.map_err(|error| {
            let consequence = name.consequence(link, &error);
            consequence.unwrap_or_else(|| {
                // Whoever waits in any group hears in which one it began.
                group.abort(&error.to_string());
                link.comm.abort();
                let message = format!("{}: {error}", shown(&control.members()));
                link.members.named(name.backend(link, message))
            })
        })?;
        let device = (Arc::clone(&link.memory), Arc::clone(&link.staging));
        let sub_group = Self {
            traffic: TrafficCounter::split_from(&self.traffic),
            ..Self::build(&control, comm, device, link.numbers.clone(), sender)
        };
        let mut sub_groups = link.sub_groups.lock();
        sub_groups.retain(|sub_group| sub_group.strong_count() > 0);
        sub_groups.push(Arc::downgrade(&sub_group.link));
        Ok(Some(sub_group))
    }

    /// Splits the control group, with one number for it and us.
    fn split_control(
        &self,
        color: Option<usize>,
        key: usize,
    ) -> Result<(Name, Option<Arc<dyn Communicator>>), Error> {
        let link = &self.link;
        let call = Caller::device_member(&link.members).split();
        // Held until all ranks have come: what is started here meanwhile has a later number.
        let mut next = self.next.lock();
        let name = Name::new(&call, *next, self.deadline());
        let control = self.control.split(color, key).map_err(|error| {
            link.comm.abort();
            link.renumbered(error)
        })?;
        *next += 1;
        self.traffic.record(&call, &link.members);
        Ok((name, control))
    }

    /// This rank of the NCCL communicator of `group`, once all its ranks have theirs.
    fn joined_by(&self, group: &ProcessGroup) -> Result<Comm, NcclError> {
        let (nccl, memory) = (self.link.comm.nccl(), &self.link.memory);
        let id = if group.rank() == 0 {
            nccl.unique_id()?.0.to_vec()
        } else {
            Vec::new()
        };
        let id = group.broadcast_bytes(id, 0)?;
        let id: [u8; UniqueId::BYTES] = id[..].try_into().map_err(|_| NcclError::OtherRanks {
            rank: group.rank(),
            failed: vec![(0, format!("its id of NCCL has {} bytes", id.len()))],
        })?;
        let comm = joined(group, nccl, memory, UniqueId(id))?;
        group.barrier().inspect_err(|_| comm.abort())?;
        debug_assert_eq!(group.traffic().total_calls(), Numbers::OF_SUB_GROUPS);
        Ok(comm)
    }
}

fn shown(members: &Members) -> String {
    match members.color() {
        Some(color) => format!(
            "the sub-group of color {color}, ranks {:?}",
            members.ranks()
        ),
        None => "the sub-group".to_owned(),
    }
}
