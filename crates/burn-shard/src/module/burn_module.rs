//! The wrapper as a Burn module: what `Module` and the traits of display give for it.

use std::any::type_name;
use std::fmt;
use std::sync::Arc;

use burn::module::{
    Content, DisplaySettings, Module, ModuleDisplay, ModuleDisplayDefault, ModuleMapper,
    ModuleVisitor, ParamGroup, Quantizer,
};
use burn::store::{ModuleRecord, RecordError};
use burn::tensor::Device;

use super::bind::{put_parameters, with_full_shapes};
use super::buffers;
use crate::ShardedModule;

impl<M: Module> Module for ShardedModule<M> {
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        self.inner().collect_devices(devices)
    }

    fn fork(self, device: &Device) -> Self {
        self.rebuild_with(|inner| inner.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.rebuild_with(|inner| inner.to_device(device))
    }

    fn train(self) -> Self {
        self.rebuild_with(Module::train)
    }

    fn valid(&self) -> Self {
        self.with_inner(self.inner().valid())
    }

    /// Returns the module as it is: reading a parameter gives the full tensor anyway, and without
    /// its reparameterization its gradient would not be averaged. For a plain module with full
    /// parameters, see [`ShardedModule::unsharded`].
    fn materialize(self) -> Self {
        self
    }

    fn num_params(&self) -> usize {
        self.engine().plan().numel()
    }

    /// A record of the full parameters, under every strategy: that of the plain module. A collective, as
    /// [`unsharded`](ShardedModule::unsharded); so are the methods that save.
    fn into_record(self) -> ModuleRecord {
        self.unsharded().into_record()
    }

    /// See [`into_record`](Self::into_record).
    fn into_record_group(self, group: ParamGroup) -> ModuleRecord {
        self.unsharded().into_record_group(group)
    }

    /// Loads a record of the full parameters, as the plain module has it; every rank keeps its part. A
    /// collective; every rank loads the same record.
    fn try_load_record(self, record: ModuleRecord) -> Result<Self, RecordError> {
        let loaded = self.unsharded().try_load_record(record)?;
        let engine = Arc::clone(self.engine());
        let buffers = buffers::collect(engine.plan(), &loaded);
        Ok(
            self.rebuild_with(|inner| {
                buffers::put(put_parameters(&engine, inner, loaded), buffers)
            }),
        )
    }

    fn quantize_weights(self, _quantizer: &mut Quantizer) -> Self {
        self.refuse_quantization()
    }

    fn quantize_weights_group(self, _quantizer: &mut Quantizer, _group: ParamGroup) -> Self {
        self.refuse_quantization()
    }

    fn visit<Visitor: ModuleVisitor>(&self, visitor: &mut Visitor) {
        self.inner().visit(visitor);
    }

    fn map<Mapper: ModuleMapper>(self, mapper: &mut Mapper) -> Self {
        self.check_mapper::<Mapper>();
        self.rebuild_with(|inner| inner.map(mapper))
    }
}

impl<M: ModuleDisplayDefault + Module> ModuleDisplayDefault for ShardedModule<M> {
    /// What the plain module shows, with the full shapes.
    fn content(&self, content: Content) -> Option<Content> {
        with_full_shapes(self.engine(), self.inner().clone()).content(content)
    }

    fn num_params(&self) -> usize {
        self.engine().plan().numel()
    }
}

impl<M: ModuleDisplay + Module> ModuleDisplay for ShardedModule<M> {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        self.inner().custom_settings()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        with_full_shapes(self.engine(), self.inner().clone()).custom_content(content)
    }
}

impl<M: ModuleDisplay + Module> fmt::Display for ShardedModule<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let full = with_full_shapes(self.engine(), self.inner().clone());
        f.write_str(&full.format(DisplaySettings::default()))
    }
}

impl<M: Module> ShardedModule<M> {
    fn refuse_quantization(&self) -> ! {
        panic!(
            "rank {}: `{}` and the other parameters of a sharded module are not quantized: ranks store and \
             average floats (quantize `unsharded()`)",
            self.engine().rank(),
            self.params()[0].path,
        )
    }

    /// Refuses what would go wrong without a word. Burn's `map` returns no error.
    fn check_mapper<Mapper>(&self) {
        let mapper = type_name::<Mapper>();
        assert!(
            !mapper.contains("ApplyReparameterization"),
            "rank {}: parameters of a sharded module carry a reparameterization already, and Burn \
             cannot nest them (apply LoRA before wrapping, on layers that stay unwrapped)",
            self.engine().rank(),
        );
        let own_optimizer = self.config().strategy.gathers_after_step();
        assert!(
            !own_optimizer || !mapper.contains("ModuleOptimizerMapper"),
            "rank {}: under strategy {} a stock optimizer would keep the whole state on every rank, \
             or step with a part of the gradients (use burn_shard::Oss, or strategy ddp or zero3)",
            self.engine().rank(),
            self.config().strategy,
        );
    }
}
