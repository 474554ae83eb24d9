//! The orders that ranks learned in earlier passes: which groups are gathered one after the other, in
//! which order groups are reduced, and how deep anchors have to be.
//!
//! The order of gathers follows from the reads, which are the same on all ranks wherever anything is
//! gathered, so each rank learns it by itself, anew in each pass. The order of reductions does not:
//! ranks may use different layers. So it is agreed on, once, and with it the levels of anchors.

/// Levels of the autodiff graph between groups before they are agreed on: more than most layers
/// have nodes.
const FIRST_LEVELS: u64 = 256;

#[derive(Debug)]
pub(crate) struct Schedule {
    /// Groups in the order of their reduction.
    pub(crate) reductions: Vec<usize>,
    /// Levels by which an anchor grows when a group is first read in a pass.
    levels: Vec<u64>,
    /// What was observed on this rank, until ranks have agreed.
    observed: Option<Observed>,
    /// Groups in the order in which the last pass needed them gathered.
    gathers: Vec<usize>,
    /// Groups in the order in which this pass has needed them gathered.
    gathering: Vec<usize>,
    /// Position in `gathers` after the last gather.
    next_gather: usize,
}

#[derive(Debug)]
struct Observed {
    reductions: Vec<usize>,
    levels: Vec<u64>,
}

impl Schedule {
    pub(crate) fn new(groups: usize) -> Self {
        let levels = vec![FIRST_LEVELS; groups];
        Self {
            reductions: (0..groups).rev().collect(),
            levels: levels.clone(),
            observed: Some(Observed {
                reductions: Vec::new(),
                levels,
            }),
            gathers: Vec::new(),
            gathering: Vec::new(),
            next_gather: 0,
        }
    }

    /// Levels to add for a group; calls `count` for what they should be while that is still open.
    pub(crate) fn levels(&mut self, group: usize, count: impl FnOnce() -> u64) -> u64 {
        if let Some(observed) = &mut self.observed {
            observed.levels[group] = count();
        }
        self.levels[group]
    }

    /// A group's gradients have all come.
    pub(crate) fn note_ready(&mut self, group: usize) {
        if let Some(observed) = &mut self.observed {
            observed.reductions.push(group);
        }
    }

    /// What this rank proposes, once: all groups in the order in which they became ready, then the
    /// levels of each.
    pub(crate) fn take_proposal(&mut self) -> Option<Vec<u64>> {
        let Observed {
            mut reductions,
            levels,
        } = self.observed.take()?;
        reductions.extend(self.reductions.iter().copied());
        let mut seen = vec![false; self.levels.len()];
        reductions.retain(|&group| !std::mem::replace(&mut seen[group], true));
        Some(
            reductions
                .into_iter()
                .map(|group| group as u64)
                .chain(levels)
                .collect(),
        )
    }

    /// Takes over what rank 0 proposed.
    pub(crate) fn agree(&mut self, proposal: &[u64]) {
        let (order, levels) = proposal.split_at(self.levels.len());
        self.levels.copy_from_slice(levels);
        self.reductions = order
            .iter()
            .map(|&group| usize::try_from(group).expect("a group index should fit"))
            .collect();
    }

    /// A group that is not gathered is needed.
    pub(crate) fn note_gather(&mut self, group: usize) {
        self.gathering.push(group);
        let len = self.gathers.len();
        let found = (0..len)
            .map(|ahead| (self.next_gather + ahead) % len)
            .find(|&at| self.gathers[at] == group);
        if let Some(at) = found {
            self.next_gather = at + 1;
        }
    }

    /// The groups that the last pass needed next, at most `count` of them.
    pub(crate) fn upcoming(&self, count: usize) -> &[usize] {
        let start = self.next_gather.min(self.gathers.len());
        let end = (start + count).min(self.gathers.len());
        &self.gathers[start..end]
    }

    /// A pass begins: whatever was gathered since the last one was no part of training.
    pub(crate) fn begin_pass(&mut self) {
        self.next_gather = 0;
        self.gathering.clear();
    }

    /// The pass is over: the next one will need the same.
    pub(crate) fn end_pass(&mut self) {
        self.gathers = std::mem::take(&mut self.gathering);
        self.next_gather = self.gathers.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after_a_pass(gathers: &[usize]) -> Schedule {
        let mut schedule = Schedule::new(4);
        schedule.begin_pass();
        assert_eq!(schedule.upcoming(9), [0usize; 0]);
        for &group in gathers {
            schedule.note_gather(group);
        }
        schedule.end_pass();
        schedule.begin_pass();
        schedule
    }

    #[test]
    fn what_the_last_pass_gathered_next_is_upcoming() {
        let mut schedule = after_a_pass(&[0, 1, 2, 1, 0]);
        assert_eq!(schedule.upcoming(2), [0, 1]);
        schedule.note_gather(0);
        assert_eq!(schedule.upcoming(2), [1, 2]);
        schedule.note_gather(1);
        schedule.note_gather(2);
        assert_eq!(schedule.upcoming(9), [1, 0]);
    }

    #[test]
    fn a_group_out_of_turn_moves_the_schedule_and_a_strange_one_leaves_it() {
        let mut schedule = after_a_pass(&[0, 1, 2, 1, 0]);
        schedule.note_gather(2);
        assert_eq!(schedule.upcoming(1), [1]);
        schedule.note_gather(3);
        assert_eq!(schedule.upcoming(1), [1]);
        // Not found further on: from the start again.
        schedule.note_gather(2);
        assert_eq!(schedule.upcoming(1), [1]);
    }

    #[test]
    fn a_proposal_names_every_group_once_and_is_made_once() {
        let mut schedule = Schedule::new(3);
        schedule.note_ready(1);
        schedule.note_ready(1);
        assert_eq!(schedule.levels(2, || 7), FIRST_LEVELS);
        let proposal = schedule.take_proposal().unwrap();
        assert_eq!(proposal, [1, 2, 0, FIRST_LEVELS, FIRST_LEVELS, 7]);
        assert_eq!(schedule.take_proposal(), None);
        schedule.agree(&proposal);
        assert_eq!(schedule.reductions, [1, 2, 0]);
        assert_eq!(schedule.levels(2, || 9), 7);
    }
}
