//! What ranks have done with a module so far, which is part of the purpose of every collective: ranks
//! that made another step, at another rate, or of other parameters, are found at the next one.

use std::fmt::Write as _;
use std::sync::Arc;

use crate::plan::Plan;
use crate::plan::verify::{HASH_START, hash_bytes};
use crate::purpose::Purpose;

/// The steps and other changes that this rank has made to a module.
#[derive(Clone, Debug)]
pub(crate) struct History {
    /// Tells modules of one process group apart.
    module: u64,
    hash: u64,
    steps: u64,
    /// Values of the module made since the last step by other means: a load, a map, a move.
    maps: u64,
    last_step: Option<LastStep>,
}

#[derive(Clone, Debug)]
struct LastStep {
    lr: Option<f64>,
    /// Trainable parameters that had no gradient.
    left_out: Arc<[usize]>,
}

impl History {
    pub(crate) fn new(module: u64) -> Self {
        Self {
            module,
            hash: hash_bytes(HASH_START, &module.to_le_bytes()),
            steps: 0,
            maps: 0,
            last_step: None,
        }
    }

    /// What it is once another value of the module was made without this crate's optimizer.
    #[must_use]
    pub(crate) fn after_map(mut self) -> Self {
        self.maps += 1;
        self.hash = hash_bytes(self.hash, b"map");
        self
    }

    /// What it is after an optimizer step of the parameters `stepped`, in plan order, each at its learning
    /// rate.
    #[must_use]
    pub(crate) fn after_step(mut self, stepped: &[(usize, f64)], plan: &Plan) -> Self {
        self.steps += 1;
        self.maps = 0;
        for (index, lr) in stepped {
            self.hash = hash_bytes(self.hash, &index.to_le_bytes());
            self.hash = hash_bytes(self.hash, &lr.to_bits().to_le_bytes());
        }
        self.hash = hash_bytes(self.hash, b"step");
        let is_left_out = |&index: &usize| {
            let found = stepped.binary_search_by_key(&index, |&(stepped, _)| stepped);
            plan.params[index].trainable && found.is_err()
        };
        self.last_step = Some(LastStep {
            lr: stepped.first().map(|&(_, lr)| lr),
            left_out: (0..plan.params.len()).filter(is_left_out).collect(),
        });
        self
    }

    /// The purpose of a collective that does `what` for `members` of the plan.
    pub(crate) fn purpose(&self, what: &str, plan: &Plan, members: &[usize]) -> Purpose {
        let mut label = hash_bytes(self.hash, what.as_bytes());
        for member in members {
            label = hash_bytes(label, &member.to_le_bytes());
        }
        let mut text = what.to_owned();
        let mut say = |args: std::fmt::Arguments<'_>| {
            text.write_fmt(args)
                .expect("writing to a string should succeed");
        };
        if let Some(&first) = members.first() {
            say(format_args!(" of `{}`", plan.params[first].path));
            if let [_, .., last] = members {
                let count = members.len();
                say(format_args!(
                    " to `{}` ({count} parameters)",
                    plan.params[*last].path
                ));
            }
        }
        say(format_args!(
            ", module {}, {} steps",
            self.module, self.steps
        ));
        if let Some(LastStep { lr, left_out }) = &self.last_step {
            match lr {
                Some(lr) => say(format_args!(" (the last at learning rate {lr}")),
                None => say(format_args!(" (the last without any gradient")),
            }
            if !left_out.is_empty() {
                say(format_args!(", leaving out {}", names(plan, left_out)));
            }
            say(format_args!(")"));
        }
        if self.maps > 0 {
            say(format_args!(", {} loads or maps since", self.maps));
        }
        // 0 would mean that nothing is to be compared.
        Purpose {
            label: label.max(1),
            text,
        }
    }
}

/// The paths of a few of `params`.
pub(crate) fn names(plan: &Plan, params: &[usize]) -> String {
    const SHOWN: usize = 3;
    let shown = params
        .iter()
        .take(SHOWN)
        .map(|&index| format!("`{}`", plan.params[index].path));
    let mut names = shown.collect::<Vec<_>>().join(", ");
    if params.len() > SHOWN {
        write!(names, " and {} more", params.len() - SHOWN)
            .expect("writing to a string should succeed");
    }
    names
}
