//! This crate provides sharded checkpoints on disk: every rank writes its own safetensors file, a
//! manifest says which file holds which elements of which tensor, and a checkpoint is there
//! completely or not at all. It knows neither Burn nor process groups.
//!
//! # Saving
//!
//! A save has three steps. What one rank alone fails at, all are told, so that all return the same:
//! after each step ranks exchange the bytes of [`tell`] by their own collectives.
//!
//! | step | rank 0 | other ranks | then |
//! |---|---|---|---|
//! | prepare | [`Writer::create`] | | rank 0 broadcasts [`tell`]`(`[`Prepared`]`)`; others [`Writer::join`] |
//! | write | [`Writer::write_rank`] | the same | all gather [`tell`]`(`[`RankReport`]`)`: [`told_by_all`] |
//! | publish | [`Writer::publish`] | | rank 0 broadcasts [`tell`]`(`[`Published`]`)` |
//!
//! A rank that cannot join says so in place of its report. Nothing that was published before is
//! touched until the new checkpoint is.
//!
//! ```
//! use burn_shard_checkpoint::{
//!     Checkpoint, DType, Description, Keep, TensorName, TensorPart, Writer, even_range, tell, told,
//!     told_by_all,
//! };
//!
//! # let root = tempfile::tempdir().unwrap();
//! # let root = root.path();
//! const WORLD_SIZE: usize = 2;
//! let weight = TensorName::parameter("encoder.weight");
//! let full: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
//!
//! // Prepare: rank 0 makes the directory, and tells the others.
//! let writer = Writer::create(root, 100)?;
//! let broadcast = tell(0, &Ok(writer.prepared().clone()));
//!
//! // Write: every rank does this, at the same time.
//! let write = |rank: usize| {
//!     let joined = told(&broadcast).and_then(|prepared| Writer::join(root, &prepared));
//!     let range = even_range(6, rank, WORLD_SIZE);
//!     let bytes = &full[range.start * 4..range.end * 4];
//!     let part = TensorPart::ranges(weight.clone(), DType::F32, &[2, 3], vec![range], bytes);
//!     tell(rank, &joined.and_then(|writer| writer.write_rank(rank, vec![part])))
//! };
//! let gathered: Vec<Vec<u8>> = (0..WORLD_SIZE).map(write).collect();
//!
//! // Publish: rank 0, if no rank has failed. (A `Writer` dropped on failure is swept up by the next.)
//! let published = told_by_all(&gathered).and_then(|reports| {
//!     let description = Description {
//!         strategy: "full".into(),
//!         user: serde_json::json!({ "learning_rate_step": 100, "seed": 7 }),
//!         ..Description::default()
//!     };
//!     writer.publish(&reports, &description, Keep::ALL)
//! })?;
//! assert_eq!(published.step, 100);
//!
//! // Load, on any number of ranks: each reads its range, from whichever files hold it.
//! let checkpoint = Checkpoint::open(root)?;
//! let mut out = [0; 4 * 4];
//! checkpoint.read_range(&weight, 1..5, &mut out)?;
//! assert_eq!(out, full[4..20]);
//! assert_eq!(checkpoint.manifest().description.user["seed"], 7);
//! # Ok::<(), burn_shard_checkpoint::Error>(())
//! ```
//!
//! # Saving while training goes on
//!
//! [`Background`] runs the second step, and nothing else, on a thread: preparing and publishing need
//! the group, which is the training loop's. A save is published when the loop next asks for it.
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//! use burn_shard_checkpoint::{
//!     Background, DType, Description, Keep, RankReport, TensorName, TensorPart, Writer,
//! };
//!
//! # let root = tempfile::tempdir().unwrap();
//! let mut background: Background<RankReport> = Background::new();
//! let writer = Arc::new(Writer::create(root.path(), 100)?);
//! let copy = vec![0; 12];
//! let job = Arc::clone(&writer);
//! background.begin(move || {
//!     let bias = TensorName::parameter("bias");
//!     job.write_rank(0, vec![TensorPart::full(bias, DType::F32, &[3], copy)])
//! })?;
//! // .. training goes on ..
//! let report = background.wait(Duration::from_secs(300))?.expect("a save is in flight");
//! let writer = Arc::into_inner(writer).expect("the job should be finished");
//! writer.publish(&[report], &Description::default(), Keep::ALL)?;
//! # Ok::<(), burn_shard_checkpoint::Error>(())
//! ```
//!
//! # Loading
//!
//! [`Checkpoint::open`] trusts nothing: what contradicts itself, was cut off, swapped or damaged is
//! refused, by an [`Error`] that says which. [`Checkpoint::resolve`] compares what is there with what
//! is wanted, strictly unless told otherwise. [`IndexedSafetensors`] reads models in the layout of
//! Hugging Face. [`consolidate`] makes one file of a checkpoint, [`reshard`] a checkpoint for another
//! number of ranks.
//!
//! # Format
//!
//! ```text
//! root/latest                          the name of the newest checkpoint
//! root/step-0000000100.000001/
//!     manifest.json                    tensors, files, and which file holds which elements
//!     manifest.xxh3                    its checksum
//!     rank-00000.safetensors ..        tensors of this rank: parameters by path, others by role/path
//! ```
//!
//! Each file is valid safetensors: a tensor that a rank holds entirely has its shape there, and what
//! is a range of one is flat. Checksums find damage; they do not keep anybody from forging one.
#![forbid(unsafe_code)]

mod background;
mod checkpoint;
mod consolidated;
mod directory;
mod dtype;
mod error;
mod header;
mod indexed;
mod manifest;
mod name;
mod part;
mod positioned;
mod resolution;
mod retention;
mod tensor_file;
mod told;
mod unique_map;
mod writer;

pub use background::Background;
pub use checkpoint::{Checkpoint, Intact};
pub use consolidated::{Content, consolidate, reshard, write_consolidated};
pub use dtype::{DType, DTypePolicy};
pub use error::Error;
pub use indexed::IndexedSafetensors;
pub use manifest::{Checksum, Description, FileInfo, Manifest, PartInfo, TensorInfo};
pub use name::{Role, TensorName};
pub use part::{SourceError, TensorPart, even_range};
pub use resolution::{Mismatch, Renames, Resolution, Wanted};
pub use retention::Keep;
pub use told::{tell, told, told_by_all};
pub use writer::{Prepared, Published, RankReport, Writer};
