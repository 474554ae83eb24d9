//! Collectives of all kinds that are in flight together.

use std::{sync::Arc, time::Duration};

use super::{Launcher, check, garbage, probe::values, shard};
use crate::{
    DType, Error, OwnedSegments, ProcessGroup, Recording, ReduceOp, SegmentLayout, Segments,
    SegmentsMut, Work,
};

/// A started collective and what it has to end with on this rank.
struct Flight {
    what: String,
    work: Box<dyn Work>,
    output: OwnedSegments<f32>,
    expected: Vec<f32>,
}

impl Flight {
    fn new(what: String, work: Box<dyn Work>, expected: Vec<f32>) -> Self {
        Self {
            what,
            work,
            output: OwnedSegments(vec![garbage(expected.len())]),
            expected,
        }
    }

    fn finish(mut self, group: &ProcessGroup) -> Result<(), Error> {
        self.work.finish(&mut self.output)?;
        check(&self.what, group, &self.output.0[0], &self.expected);
        Ok(())
    }
}

/// Starts one collective of each kind that moves something, of `numel` elements.
fn start(group: &ProcessGroup, seed: u64, numel: usize) -> Result<Vec<Flight>, Error> {
    let (rank, world_size) = (group.rank(), group.world_size());
    let communicator = group.communicator();
    let inputs: Vec<Vec<f32>> = (0..world_size)
        .map(|rank| values(seed, rank, numel))
        .collect();
    let expected = super::reduced(ReduceOp::Sum, &inputs).expect("f32 should have a sum");
    let own = || Arc::new(OwnedSegments(vec![inputs[rank].clone()]));
    let part = Arc::new(OwnedSegments(vec![shard(&inputs[0], rank, world_size)]));
    let root = numel % world_size;
    let layout = SegmentLayout::of(&*own());
    let sent = (rank == root).then(|| own() as Arc<dyn Segments>);
    let name = |what: &str| format!("{what} {seed}");
    Ok(vec![
        Flight::new(
            name("all_gather"),
            communicator.all_gather(part, &[numel])?,
            inputs[0].clone(),
        ),
        Flight::new(
            name("all_reduce"),
            communicator.all_reduce(own(), ReduceOp::Sum)?,
            expected.clone(),
        ),
        Flight::new(
            name("broadcast"),
            communicator.broadcast(sent, layout, root)?,
            inputs[root].clone(),
        ),
        Flight::new(
            name("reduce_scatter"),
            communicator.reduce_scatter(own(), ReduceOp::Sum)?,
            shard(&expected, rank, world_size),
        ),
    ])
}

/// Collectives of all kinds, small and large, are finished in another order on each rank, waited for before,
/// dropped unfinished, late, and overtaken by a barrier.
pub fn all_kinds_may_be_in_flight_together(launcher: &impl Launcher) {
    for world_size in 1..=4 {
        launcher.run(world_size, |group| {
            for seed in 0..2 {
                let recording = Recording::new(Arc::clone(group.communicator()))
                    .with_delays(seed, Duration::from_millis(seed));
                mixed(&ProcessGroup::new(Arc::new(recording)));
            }
        });
    }
}

fn mixed(group: &ProcessGroup) {
    let rank = group.rank();
    let mut flights: Vec<Flight> = [7, 300_007, 1009, 3]
        .into_iter()
        .zip(0..)
        .flat_map(|(numel, seed)| start(group, seed, numel).unwrap())
        .collect();
    if rank == 1 {
        group.barrier().unwrap();
    }
    let count = flights.len();
    flights.rotate_left(5 * rank % count);
    if rank % 2 == 1 {
        flights.reverse();
    }
    for (index, mut flight) in flights.into_iter().enumerate() {
        match (index + rank) % 5 {
            0 => drop(flight),
            1 => {
                flight.work.wait().unwrap();
                assert!(flight.work.is_ready());
                flight.finish(group).unwrap();
            }
            _ => flight.finish(group).unwrap(),
        }
    }
    if rank != 1 {
        group.barrier().unwrap();
    }
}

/// If a rank ends the group while collectives are in flight, each of them ends with its result or the cause.
pub fn what_is_in_flight_ends_with_the_group(launcher: &impl Launcher) {
    launcher.run(3, |group| {
        let ends = |error: Error| {
            let aborted = matches!(error.root_cause(), Error::Aborted { rank: 1, .. });
            assert!(aborted, "{error}");
        };
        // Another rank may find the group ended before it has started all.
        let flights = |seed| {
            start(&group, seed, 300_007).unwrap_or_else(|error| {
                ends(error);
                Vec::new()
            })
        };
        let first = flights(0);
        if group.rank() == 1 {
            // The others wait for what this one never starts.
            group.abort("out of data");
            return;
        }
        let second = flights(1);
        for flight in first {
            flight.finish(&group).unwrap_or_else(ends);
        }
        for flight in second {
            ends(flight.finish(&group).unwrap_err());
        }
    });
}

/// Two values with a label, and words for what they are.
struct Labelled(u64, &'static str);

impl Segments for Labelled {
    fn dtype(&self) -> DType {
        DType::U8
    }
    fn count(&self) -> usize {
        1
    }
    fn numel(&self, _: usize) -> usize {
        2
    }
    fn bytes(&self, _: usize) -> Option<&[u8]> {
        Some(&[1, 2])
    }
    fn label(&self) -> u64 {
        self.0
    }
    fn describe(&self) -> String {
        self.1.to_owned()
    }
}

/// Ranks whose calls differ in nothing but what the elements are disagree, and are told in words what the
/// elements were; equal labels agree, whatever the words.
pub fn mismatches_say_what_the_elements_are(launcher: &impl Launcher) {
    launcher.run(3, |group| {
        let call = |mine: Labelled| -> Result<(), Error> {
            let work = group
                .communicator()
                .all_reduce(Arc::new(mine), ReduceOp::Sum)?;
            let mut output = OwnedSegments(vec![vec![0u8; 2]]);
            work.finish(&mut output)?;
            assert_eq!(output.bytes_mut(0), [3, 6]);
            Ok(())
        };
        let odd = group.rank() == 1;
        call(Labelled(7, if odd { "one" } else { "another" })).unwrap();
        let error = call(match odd {
            true => Labelled(8, "gradients of `decoder`, step 3"),
            false => Labelled(7, "gradients of `encoder`, step 3"),
        })
        .unwrap_err();
        let text = error.to_string();
        for expected in [
            "rank 0: all_reduce u8 sum [2] of gradients of `encoder`, step 3",
            "rank 1: all_reduce u8 sum [2] of gradients of `decoder`, step 3",
            "usual cause",
        ] {
            assert!(text.contains(expected), "{text}");
        }
        assert!(!text.contains("label"), "{text}");
    });
}
