//! Reads of parameters in checkpointed blocks.
//!
//! The forward of such a block records nothing: a read is a mere gather. But the gradient will come, from
//! the block's recomputation in backward, so the forward announces it, and makes the pass's begin
//! token an ancestor of the block. The recomputation has a graph of its own, which must share no node with
//! the one that Burn is working on: its reads have tokens of their own, and report to the pass of
//! the forward. They keep the full parameter, since their backward follows at once.

use std::sync::Arc;

use burn::backend::Dispatch;
use burn::tensor::{Device, Tensor};
use burn_shard_recompute::scope::{self, BlockId};

use super::graph::{ParamHandle, Tokens};
use super::ops::{Read, ShardOps};
use crate::runtime::pass::PassId;

/// A read in the forward of a block: the parameter, untracked.
pub(super) fn read_in_forward<const D: usize>(param: &ParamHandle, base: Tensor<D>) -> Tensor<D> {
    assert!(
        !base.is_tracked(),
        "rank {} read `{}` in a checkpointed block that it is no part of, so its gradient would be lost \
         (pass every module that the block uses as the block: a tuple of modules is one)",
        param.engine().rank(),
        param.engine().plan().params[param.index].path,
    );
    if param.instance.leaf(param.index).is_some() {
        announce(param, &base.device());
    }
    read_untracked(param, base)
}

/// The parameter without a gradient, on the device of `base`.
pub(super) fn read_untracked<const D: usize>(param: &ParamHandle, base: Tensor<D>) -> Tensor<D> {
    if !param.engine().plan().group_of(param.index).unshards() {
        return base;
    }
    let checkpointing = base.gradient_checkpointing_strategy();
    let stored = base.inner().into_dispatch();
    let read = Read {
        param: param.clone(),
        pass: None,
    };
    let full = Dispatch::unshard(stored.clone(), stored.clone(), stored, read);
    let full = Tensor::from_dispatch(full);
    match checkpointing {
        Some(strategy) => full
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy),
        None => full,
    }
}

/// Announces a gradient of this block's recomputation, so that the group is not reduced before.
fn announce(param: &ParamHandle, device: &Device) {
    let block = scope::block().expect("the forward of a block should be running");
    let pass = pass_of(param, block).unwrap_or_else(|| begin_block(param, block, device));
    param.engine().expect(pass, param.index);
    let weak = param.downgrade();
    scope::on_recomputed(Box::new(move || {
        // By now the recomputation's own reads are announced.
        if let Some(param) = weak.try_upgrade() {
            param.engine().no_longer_expect(pass, param.index);
        }
    }));
}

fn pass_of(param: &ParamHandle, block: BlockId) -> Option<PassId> {
    param.graph.blocks.lock().get(&block).copied()
}

/// Finds out which pass a block belongs to that reads its first parameter.
fn begin_block(param: &ParamHandle, block: BlockId, device: &Device) -> PassId {
    let pass = match scope::recomputed_block() {
        Some(around) => {
            pass_of(param, around).expect("a block should read the same when it runs again")
        }
        None => {
            let (pass, begin) = param.open_pass(device);
            scope::add_ancestor(begin);
            pass
        }
    };
    param.graph.blocks.lock().insert(block, pass);
    let graph = Arc::downgrade(&param.graph);
    scope::on_recomputed(Box::new(move || {
        if let Some(graph) = graph.upgrade() {
            graph.blocks.lock().remove(&block);
        }
    }));
    pass
}

/// The tokens of a read in the recomputation of a block: untracked leaves, but for the pass.
pub(super) fn tokens(param: &ParamHandle, device: &Device) -> Tokens {
    let block = scope::block().expect("a block should be running again");
    let unused = Tensor::zeros([1], device);
    Tokens {
        pass: pass_of(param, block).expect("a block should read the same when it runs again"),
        anchor: unused.clone(),
        begin: unused,
    }
}
