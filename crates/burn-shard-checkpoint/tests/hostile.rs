//! Files that somebody damaged, mixed up or forged: the right error, no panic, nothing outside read.
#![allow(clippy::unwrap_used, reason = "a test ends at the first error")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use burn_shard_checkpoint::{Checkpoint, Error, Keep, TensorName};
use common::{edit_manifest, replace_manifest, save};
use serde_json::{Value, json};
use tempfile::TempDir;

fn saved() -> (TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let path = save(root.path(), 3, 2, Keep::ALL).unwrap().path;
    (root, path)
}

/// The error of opening, verifying and reading all of a checkpoint.
fn refused(path: &Path) -> Error {
    let opened = Checkpoint::open(path).and_then(|checkpoint| {
        checkpoint.verify()?;
        let names: Vec<_> = checkpoint
            .tensors()
            .iter()
            .map(|tensor| tensor.name())
            .collect();
        names
            .iter()
            .try_for_each(|name| checkpoint.read(name).map(drop))
    });
    opened.expect_err("it should be refused")
}

fn edited(edit: impl FnOnce(&mut Value)) -> Error {
    let (_root, path) = saved();
    edit_manifest(&path, edit);
    refused(&path)
}

/// The entry of a tensor that both ranks hold.
fn weight(manifest: &mut Value) -> &mut Value {
    let tensors = manifest["tensors"].as_array_mut().unwrap();
    tensors
        .iter_mut()
        .find(|tensor| tensor["path"] == "ids")
        .unwrap()
}

#[test]
fn a_manifest_that_was_only_written_anew_is_accepted() {
    let (_root, path) = saved();
    edit_manifest(&path, |_| {});
    Checkpoint::open(&path).unwrap().verify().unwrap();
}

#[test]
fn a_flipped_bit_is_found_wherever_it_is() {
    let (_root, path) = saved();
    for name in common::names(&path) {
        let file = path.join(&name);
        let good = fs::read(&file).unwrap();
        // Every byte of what is small, and of the rest some, the last among them.
        let stride = if good.len() < 100 { 1 } else { 7 };
        for at in (0..good.len()).rev().step_by(stride) {
            let mut bad = good.clone();
            bad[at] ^= 1 << (at % 8);
            fs::write(&file, bad).unwrap();
            let error = refused(&path);
            let known = if let Error::Checksum { path, .. } = &error {
                path.parent() == file.parent()
            } else {
                matches!(&error, Error::Header { path, .. } if *path == file)
            };
            assert!(known, "{name} byte {at}: {error:?}");
        }
        fs::write(&file, good).unwrap();
    }
    Checkpoint::open(&path).unwrap().verify().unwrap();
}

#[test]
fn every_truncation_is_found_when_the_checkpoint_is_opened() {
    let (_root, path) = saved();
    for name in common::names(&path) {
        let file = path.join(&name);
        let good = fs::read(&file).unwrap();
        for length in (0..good.len()).step_by(7) {
            fs::write(&file, &good[..length]).unwrap();
            let error = Checkpoint::open(&path).unwrap_err();
            let known = matches!(error, Error::FileLength { .. } | Error::Checksum { .. });
            assert!(known, "{name} cut to {length}: {error:?}");
        }
        fs::write(&file, [&good[..], b"x"].concat()).unwrap();
        let error = Checkpoint::open(&path).unwrap_err();
        let known = matches!(error, Error::FileLength { .. } | Error::Checksum { .. });
        assert!(known, "{name} longer: {error:?}");
        fs::remove_file(&file).unwrap();
        // Without a manifest it is a directory like others.
        let error = Checkpoint::open(&path).unwrap_err();
        assert!(
            matches!(error, Error::Io { .. } | Error::NoCheckpoint { .. }),
            "{name}: {error:?}"
        );
        fs::write(&file, good).unwrap();
    }
}

#[test]
fn swapped_files_are_found_when_they_are_first_read() {
    let (root, path) = saved();
    let file = |rank: usize| path.join(format!("rank-0000{rank}.safetensors"));
    // Two ranks of even parts would have files of the same length.
    let other = save(root.path(), 4, 2, Keep::ALL).unwrap().path;
    fs::copy(other.join("rank-00000.safetensors"), file(0)).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let mut out = [0; 8];
    let error = checkpoint
        .read_range(&TensorName::parameter("ids"), 0..1, &mut out)
        .unwrap_err();
    assert!(
        matches!(error, Error::Checksum { part: "header", .. }),
        "{error}"
    );
    // The other rank's file is right, and can be read.
    checkpoint
        .read_range(&TensorName::parameter("ids"), 7..8, &mut out)
        .unwrap();
}

#[test]
fn another_format_and_another_version_are_told_apart_from_damage() {
    let error = edited(|manifest| manifest["version"] = json!(2));
    assert!(
        matches!(
            error,
            Error::WrongVersion {
                found: 2,
                supported: 1,
                ..
            }
        ),
        "{error}"
    );
    // A later version may have any fields.
    let error =
        edited(|manifest| *manifest = json!({"format": "burn-shard-checkpoint", "version": 9}));
    assert!(
        matches!(error, Error::WrongVersion { found: 9, .. }),
        "{error}"
    );
    let error = edited(|manifest| manifest["format"] = json!("x".repeat(1000)));
    assert!(
        matches!(error, Error::WrongFormat { .. }) && error.to_string().len() < 300,
        "{error}"
    );
    for (key, value) in [
        ("version", json!("1")),
        ("surprise", json!(1)),
        ("step", json!(-1)),
    ] {
        let error = edited(|manifest| manifest[key] = value);
        assert!(matches!(error, Error::BadManifest { .. }), "{error}");
    }
}

#[test]
fn text_that_is_no_manifest_is_refused() {
    let (_root, path) = saved();
    let deep = "[".repeat(100_000);
    let latin: &[u8] = b"{\"format\": \"\xff\"}";
    for text in [&b""[..], b"{}", b"null", b"\0\0\0", latin, deep.as_bytes()] {
        replace_manifest(&path, text);
        let error = refused(&path);
        assert!(matches!(error, Error::BadManifest { .. }), "{error}");
    }
}

#[test]
fn a_manifest_cannot_lead_out_of_its_directory() {
    for name in [
        "../rank-00000.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "a\\b.safetensors",
        "C:x.safetensors",
        ".hidden.safetensors",
        "..",
        "",
        "nul\0.safetensors",
        "manifest.json",
    ] {
        let error = edited(|manifest| manifest["files"][0]["name"] = json!(name));
        assert!(
            matches!(error, Error::UnsafeFileName { .. }),
            "{name:?}: {error}"
        );
    }
    let error = edited(|manifest| {
        manifest["files"][0]["name"] = json!(format!("{}.safetensors", "x".repeat(300)))
    });
    assert!(matches!(error, Error::UnsafeFileName { .. }), "{error}");
}

#[cfg(unix)]
#[test]
fn symbolic_links_and_pipes_are_not_followed() {
    let (root, path) = saved();
    for name in common::names(&path) {
        let (file, moved) = (path.join(&name), root.path().join("moved"));
        fs::rename(&file, &moved).unwrap();
        std::os::unix::fs::symlink(&moved, &file).unwrap();
        let error = refused(&path);
        assert!(
            matches!(error, Error::NotARegularFile { .. }),
            "{name}: {error}"
        );
        fs::remove_file(&file).unwrap();
        // Opening a pipe would wait for a writer.
        let made = std::process::Command::new("mkfifo")
            .arg(&file)
            .status()
            .unwrap();
        assert!(made.success());
        let error = refused(&path);
        assert!(
            matches!(error, Error::NotARegularFile { .. }),
            "{name}: {error}"
        );
        fs::remove_file(&file).unwrap();
        fs::rename(&moved, &file).unwrap();
    }
    Checkpoint::open(&path).unwrap().verify().unwrap();
}

#[test]
fn names_that_appear_twice_are_refused() {
    let error = edited(|manifest| {
        let first = manifest["files"][0]["name"].clone();
        manifest["files"][1]["name"] = first;
    });
    assert!(matches!(error, Error::DuplicateFile { .. }), "{error}");
    let error = edited(|manifest| {
        let copy = weight(manifest).clone();
        manifest["tensors"].as_array_mut().unwrap().push(copy);
    });
    assert!(matches!(error, Error::DuplicateTensor { .. }), "{error}");
    let (_root, path) = saved();
    let text = fs::read_to_string(path.join("manifest.json")).unwrap();
    replace_manifest(
        &path,
        text.replace("\"step\": 3,", "\"step\": 3, \"step\": 4,")
            .as_bytes(),
    );
    let error = refused(&path);
    assert!(matches!(error, Error::BadManifest { .. }), "{error}");
}

#[test]
fn parts_that_overlap_leave_gaps_or_are_nowhere_are_refused() {
    let parts = |parts: Value| edited(|manifest| weight(manifest)["parts"] = parts);
    let part =
        |file: usize, start: usize, end: usize| json!({"file": file, "start": start, "end": end});
    let error = parts(json!([part(0, 0, 4), part(1, 3, 8)]));
    assert!(
        matches!(
            error,
            Error::Overlap {
                start: 3,
                end: 4,
                ..
            }
        ),
        "{error}"
    );
    let error = parts(json!([part(0, 0, 8), part(1, 0, 8)]));
    assert!(
        matches!(
            error,
            Error::Overlap {
                start: 0,
                end: 8,
                ..
            }
        ),
        "{error}"
    );
    let error = parts(json!([part(0, 0, 3), part(1, 4, 8)]));
    assert!(
        matches!(
            error,
            Error::Gap {
                start: 3,
                end: 4,
                ..
            }
        ),
        "{error}"
    );
    let error = parts(json!([part(0, 0, 4)]));
    assert!(
        matches!(
            error,
            Error::Gap {
                start: 4,
                end: 8,
                ..
            }
        ),
        "{error}"
    );
    let error = parts(json!([]));
    assert!(
        matches!(
            error,
            Error::Gap {
                start: 0,
                end: 8,
                ..
            }
        ),
        "{error}"
    );
    for (start, end) in [(4, 9), (4, 4), (5, 4), (0, usize::MAX)] {
        let error = parts(json!([part(0, 0, 4), part(1, start, end)]));
        assert!(
            matches!(error, Error::Range { .. }),
            "{start}..{end}: {error}"
        );
    }
    let error = parts(json!([part(0, 0, 4), part(2, 4, 8)]));
    assert!(
        matches!(
            error,
            Error::NoSuchFile {
                file: 2,
                files: 2,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn absurd_shapes_and_lengths_allocate_nothing() {
    let shape = |shape: Value, end: u64| {
        edited(|manifest| {
            weight(manifest)["shape"] = shape;
            weight(manifest)["parts"] = json!([{"file": 0, "start": 0, "end": end}]);
        })
    };
    let error = shape(json!([u64::MAX, 2]), 8);
    assert!(matches!(error, Error::ShapeOverflow { .. }), "{error}");
    let error = shape(json!([1_u64 << 61]), 1 << 61);
    assert!(matches!(error, Error::ShapeOverflow { .. }), "{error}");
    // It can be counted, but no file of this length holds it.
    let error = shape(json!([1_u64 << 50]), 1 << 50);
    assert!(matches!(error, Error::FileLength { .. }), "{error}");
    let error = shape(json!([-1]), 8);
    assert!(matches!(error, Error::BadManifest { .. }), "{error}");
    let error = edited(|manifest| manifest["files"][0]["bytes"] = json!(u64::MAX));
    assert!(matches!(error, Error::FileLength { .. }), "{error}");
    let error = edited(|manifest| manifest["world_size"] = json!(u64::MAX));
    assert!(matches!(error, Error::Reports { .. }), "{error}");
    let error = edited(|manifest| manifest["files"][1]["rank"] = json!(7));
    assert!(matches!(error, Error::Reports { .. }), "{error}");
}

#[test]
fn a_manifest_that_contradicts_the_files_is_refused() {
    let error = edited(|manifest| weight(manifest)["path"] = json!("other"));
    assert!(matches!(error, Error::FileDisagrees { .. }), "{error}");
    let error = edited(|manifest| weight(manifest)["dtype"] = json!("U64"));
    assert!(matches!(error, Error::FileDisagrees { .. }), "{error}");
    let error = edited(|manifest| weight(manifest)["dtype"] = json!("F8_E4M3"));
    assert!(matches!(error, Error::BadManifest { .. }), "{error}");
    let error = edited(|manifest| {
        weight(manifest)["parts"] =
            json!([{"file": 0, "start": 0, "end": 3}, {"file": 1, "start": 3, "end": 8}]);
    });
    assert!(matches!(error, Error::FileDisagrees { .. }), "{error}");
    for (path, role) in [
        ("", "parameter"),
        ("a", ""),
        ("a", "x/y"),
        ("a\u{7}", "parameter"),
    ] {
        let error = edited(|manifest| {
            let tensor = weight(manifest);
            tensor["path"] = json!(path);
            tensor["role"] = json!(role);
        });
        assert!(matches!(error, Error::BadName { .. }), "{error}");
        assert!(!error.to_string().contains('\u{7}'), "{error:?}");
    }
}

/// A file forged together with the manifest: all checksums are right.
fn forged(header: &str, declared: Option<u64>, data: &[u8]) -> Error {
    use xxhash_rust::xxh3::xxh3_64;

    let (_root, path) = saved();
    let length = declared.unwrap_or(header.len() as u64);
    let file = [&length.to_le_bytes()[..], header.as_bytes(), data].concat();
    fs::write(path.join("rank-00000.safetensors"), &file).unwrap();
    edit_manifest(&path, |manifest| {
        let info = &mut manifest["files"][0];
        info["bytes"] = json!(file.len());
        info["xxh3"] = json!(format!("{:016x}", xxh3_64(&file)));
        info["header_xxh3"] = json!(format!("{:016x}", xxh3_64(&file[..8 + header.len()])));
        manifest["tensors"] = json!([{
            "path": "w", "role": "parameter", "dtype": "U8", "shape": [4],
            "parts": [{"file": 0, "start": 0, "end": 4}],
        }]);
    });
    refused(&path)
}

#[test]
fn forged_headers_are_refused() {
    let good = r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    for (header, declared, data) in [
        (good, Some(u64::MAX), &b"abcd"[..]),
        (good, Some(100_000_001), b"abcd"),
        (good, Some(99_999_999), b"abcd"),
        (good, Some(1), b"abcd"),
        (good, None, b"abcde"),
        (
            r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
            None,
            b"abcd",
        ),
        (
            r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
            None,
            b"abcd",
        ),
        (
            r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}}"#,
            None,
            b"abcde",
        ),
        (
            r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#,
            None,
            b"abcd",
        ),
        (
            r#"{"w":{"dtype":"U8","shape":[18446744073709551615,2],"data_offsets":[0,4]}}"#,
            None,
            b"abcd",
        ),
        (
            r#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,18446744073709551615]}}"#,
            None,
            b"abcd",
        ),
        (
            r#"{"w":{"dtype":"U9","shape":[4],"data_offsets":[0,4]}}"#,
            None,
            b"abcd",
        ),
        (
            r#"{"__metadata__":{"a":1},"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
            None,
            b"abcd",
        ),
        ("[]", None, b"abcd"),
        ("", None, b"abcd"),
    ] {
        let error = forged(header, declared, data);
        let known = matches!(error, Error::Header { .. } | Error::FileLength { .. });
        assert!(known, "{header} {declared:?}: {error:?}");
    }
    let error = forged(
        r#"{"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
        None,
        b"abcd",
    );
    assert!(matches!(error, Error::FileDisagrees { .. }), "{error}");
}
