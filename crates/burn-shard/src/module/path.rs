//! Where in a module a traversal is.

/// Module path while a module is traversed.
#[derive(Debug, Default)]
pub(crate) struct Path(Vec<String>);

impl Path {
    pub(crate) fn enter(&mut self, name: &str) {
        self.0.push(name.to_owned());
    }

    pub(crate) fn exit(&mut self) {
        self.0.pop();
    }

    pub(crate) fn join(&self) -> String {
        self.0.join(".")
    }
}
