//! Which layers there are: read from the source of burn-nn that this build uses.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Public types that are modules, and the text of their definition.
pub(crate) fn modules() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    visit(&directory().join("src"), &mut found);
    found
}

/// Where cargo has unpacked burn-nn.
fn directory() -> PathBuf {
    // Offline first: whoever builds this has burn-nn, but not always what other platforms need.
    let answer = metadata(&["--offline"]).or_else(|_| metadata(&[]));
    let answer: serde_json::Value = serde_json::from_slice(&answer.unwrap()).unwrap();
    let packages = answer["packages"].as_array().unwrap();
    let package = packages.iter().find(|p| p["name"] == "burn-nn").unwrap();
    let manifest = Path::new(package["manifest_path"].as_str().unwrap());
    manifest.parent().unwrap().to_owned()
}

fn metadata(options: &[&str]) -> Result<Vec<u8>, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked"])
        .args(options)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .map_err(|error| format!("cargo metadata: {error}"))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

fn visit(directory: &Path, found: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            visit(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            read(&std::fs::read_to_string(&path).unwrap(), found);
        }
    }
}

fn read(source: &str, found: &mut BTreeMap<String, String>) {
    // Unit tests come last in a file, and define modules that are not public.
    let source = source.split("#[cfg(test)]\nmod tests").next().unwrap();
    let words = |text: &str| -> Vec<String> {
        let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
        words.map(ToOwned::to_owned).collect()
    };
    for (at, _) in source.match_indices("#[derive(") {
        let rest = &source[at..];
        let (derived, rest) = rest.split_once(']').unwrap();
        if !words(derived).iter().any(|word| word == "Module") {
            continue;
        }
        let item = rest.lines().map(str::trim);
        let mut item = item.skip_while(|line| line.is_empty() || line.starts_with(['#', '/']));
        let first = item.next().unwrap();
        let kinds = ["pub struct ", "pub enum "];
        if let Some(name) = kinds.iter().find_map(|kind| first.strip_prefix(kind)) {
            let name = words(name).swap_remove(0);
            let body = if first.ends_with(';') {
                String::new()
            } else {
                rest.split("\n}").next().unwrap().to_owned()
            };
            found.insert(name, body);
        }
    }
    let by_hand = source.lines().filter(|line| line.starts_with("impl"));
    for line in by_hand.filter_map(|line| line.split_once(" Module for ")) {
        found.insert(words(line.1).swap_remove(0), source.to_owned());
    }
}
