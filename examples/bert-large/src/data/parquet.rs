//! Documents of `.parquet` files: the rows of a column `text`.

use std::path::Path;

use super::corpus::Document;
use crate::error::Error;

#[cfg(not(feature = "parquet"))]
pub(super) fn read(path: &Path) -> Result<Vec<Document>, Error> {
    Err(Error::NoParquet { path: path.into() })
}

/// # Errors
/// The file cannot be read, its compression is not built in, or it has no column `text` of strings.
#[cfg(feature = "parquet")]
pub(super) fn read(path: &Path) -> Result<Vec<Document>, Error> {
    use parquet::file::reader::{FileReader, SerializedFileReader};
    use parquet::record::Field;
    use parquet::schema::types::Type;

    use super::formats::blocks;

    let failed = |source| Error::Parquet {
        path: path.into(),
        source: Box::new(source),
    };
    let reader = SerializedFileReader::new(crate::input::open(path)?).map_err(failed)?;
    let schema = reader.metadata().file_metadata().schema();
    let fields = schema.get_fields();
    let Some(text) = fields.iter().find(|field| field.name() == "text") else {
        let columns = fields.iter().map(|field| field.name().to_owned()).collect();
        return Err(Error::NoTextColumn {
            path: path.into(),
            columns,
        });
    };
    if let Some(found) = other_than_strings(text) {
        return Err(Error::TextColumnType {
            path: path.into(),
            found,
        });
    }
    if let Some(codec) = codec_not_built_in(reader.metadata()) {
        return Err(Error::ParquetCodec {
            path: path.into(),
            codec,
        });
    }
    let only_text = Type::group_type_builder(schema.name()).with_fields(vec![text.clone()]);
    let only_text = only_text.build().map_err(failed)?;
    let rows = reader.get_row_iter(Some(only_text)).map_err(failed)?;
    rows.enumerate()
        .map(|(index, row)| {
            let row = row.map_err(failed)?;
            let field = row.get_column_iter().next().map(|(_, field)| field);
            let text = match field {
                Some(Field::Str(text)) => Some(text.as_str()),
                Some(Field::Bytes(bytes)) => std::str::from_utf8(bytes.data()).ok(),
                // A null is an empty document.
                Some(Field::Null) | None => Some(""),
                Some(_) => None,
            };
            let text = text.ok_or(Error::ParquetRow {
                path: path.into(),
                row: index + 1,
            })?;
            Ok(Document::from_paragraphs(blocks(text)))
        })
        .collect()
}

/// What a column holds, unless strings, or bytes that may be some.
#[cfg(feature = "parquet")]
fn other_than_strings(column: &parquet::schema::types::Type) -> Option<String> {
    use parquet::basic::{ConvertedType, Repetition, Type};

    let info = column.get_basic_info();
    if column.is_group() {
        return Some("nested values".into());
    }
    if info.has_repetition() && info.repetition() == Repetition::REPEATED {
        return Some("lists".into());
    }
    let is_text = matches!(
        info.converted_type(),
        ConvertedType::NONE | ConvertedType::UTF8 | ConvertedType::ENUM | ConvertedType::JSON
    );
    let found = column.get_physical_type();
    (found != Type::BYTE_ARRAY || !is_text).then(|| found.to_string())
}

/// The compression of a file, if it needs C code.
#[cfg(feature = "parquet")]
fn codec_not_built_in(metadata: &parquet::file::metadata::ParquetMetaData) -> Option<&'static str> {
    use parquet::basic::Compression;

    let groups = metadata.row_groups().iter();
    groups
        .flat_map(|group| group.columns())
        .find_map(|column| match column.compression() {
            Compression::ZSTD(_) => Some("Zstandard"),
            Compression::LZO => Some("LZO"),
            Compression::UNCOMPRESSED
            | Compression::SNAPPY
            | Compression::GZIP(_)
            | Compression::BROTLI(_)
            | Compression::LZ4
            | Compression::LZ4_RAW => None,
        })
}

#[cfg(all(test, feature = "parquet"))]
#[allow(clippy::unwrap_used, reason = "a test ends at the first error")]
mod tests {
    use std::fs::File;
    use std::path::PathBuf;

    use parquet::basic::Compression;
    use parquet::data_type::{ByteArray, ByteArrayType, Int32Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
    use parquet::schema::parser::parse_message_type;

    use super::super::corpus::Corpus;
    use super::*;

    /// Writes a file of one column of two rows.
    fn write(
        directory: &Path,
        column: &str,
        compression: Compression,
        rows: impl FnOnce(&mut SerializedColumnWriter<'_>),
    ) -> PathBuf {
        let path = directory.join("a.parquet");
        let end = if column.ends_with('}') { "" } else { ";" };
        let schema = parse_message_type(&format!("message m {{ {column}{end} }}")).unwrap();
        let properties = WriterProperties::builder().set_compression(compression);
        let file = File::create(&path).unwrap();
        let mut file =
            SerializedFileWriter::new(file, schema.into(), properties.build().into()).unwrap();
        let mut group = file.next_row_group().unwrap();
        let mut writer = group.next_column().unwrap().unwrap();
        rows(&mut writer);
        writer.close().unwrap();
        group.close().unwrap();
        file.close().unwrap();
        path
    }

    fn texts(writer: &mut SerializedColumnWriter<'_>) {
        let texts = ["One. Two.", "Three."].map(ByteArray::from);
        let writer = writer.typed::<ByteArrayType>();
        writer.write_batch(&texts, None, None).unwrap();
    }

    #[test]
    fn a_row_is_a_document_in_every_type_and_codec_of_strings() {
        let directory = tempfile::tempdir().unwrap();
        let types = [
            ("required binary text (UTF8)", Compression::UNCOMPRESSED),
            ("required binary text (UTF8)", Compression::SNAPPY),
            (
                "required binary text (UTF8)",
                Compression::GZIP(Default::default()),
            ),
            (
                "required binary text (UTF8)",
                Compression::BROTLI(Default::default()),
            ),
            ("required binary text (UTF8)", Compression::LZ4_RAW),
            ("required binary text", Compression::UNCOMPRESSED),
        ];
        for (column, codec) in types {
            let path = write(directory.path(), column, codec, texts);
            let documents = Corpus::read(&[path]).unwrap().documents.into_iter();
            let sentences: Vec<_> = documents.map(|document| document.sentences).collect();
            assert_eq!(
                sentences,
                [vec!["One.", "Two."], vec!["Three."]],
                "{codec:?}"
            );
        }
    }

    #[test]
    fn a_null_is_a_document_without_text() {
        let directory = tempfile::tempdir().unwrap();
        let column = "optional binary text (UTF8)";
        let path = write(
            directory.path(),
            column,
            Compression::UNCOMPRESSED,
            |writer| {
                let writer = writer.typed::<ByteArrayType>();
                let texts = [ByteArray::from("One.")];
                writer.write_batch(&texts, Some(&[0, 1]), None).unwrap();
            },
        );
        let corpus = Corpus::read(&[path]).unwrap();
        assert_eq!((corpus.documents.len(), corpus.empty), (1, 1));
    }

    #[test]
    fn other_columns_are_refused_for_what_they_hold() {
        let directory = tempfile::tempdir().unwrap();
        let refused = |column: &str, rows: fn(&mut SerializedColumnWriter<'_>)| {
            let path = write(directory.path(), column, Compression::UNCOMPRESSED, rows);
            let text = Corpus::read(&[path]).unwrap_err().to_string();
            text.split_once("a.parquet: ").unwrap().1.to_owned()
        };
        let numbers: fn(&mut SerializedColumnWriter<'_>) = |writer| {
            let writer = writer.typed::<Int32Type>();
            writer.write_batch(&[1, 2], None, None).unwrap();
        };
        assert_eq!(
            refused("required binary body (UTF8)", texts),
            r#"no column `text` (there are ["body"])"#
        );
        assert_eq!(
            refused("required int32 text", numbers),
            "column `text` holds INT32, not strings"
        );
        let lists: fn(&mut SerializedColumnWriter<'_>) = |writer| {
            let texts = ["One.", "Two."].map(ByteArray::from);
            let writer = writer.typed::<ByteArrayType>();
            writer
                .write_batch(&texts, Some(&[1, 1]), Some(&[0, 1]))
                .unwrap();
        };
        assert_eq!(
            refused("repeated binary text (UTF8)", lists),
            "column `text` holds lists, not strings"
        );
        assert_eq!(
            refused(
                "optional group text (LIST) { repeated group list { required binary item (UTF8); } }",
                |w| {
                    let texts = ["One.", "Two."].map(ByteArray::from);
                    let writer = w.typed::<ByteArrayType>();
                    writer
                        .write_batch(&texts, Some(&[2, 2]), Some(&[0, 1]))
                        .unwrap();
                }
            ),
            "column `text` holds nested values, not strings"
        );
        let bytes: fn(&mut SerializedColumnWriter<'_>) = |writer| {
            let values = [ByteArray::from("One."), ByteArray::from(vec![255, 254])];
            let writer = writer.typed::<ByteArrayType>();
            writer.write_batch(&values, None, None).unwrap();
        };
        assert_eq!(
            refused("required binary text", bytes),
            "row 2: no UTF-8 text"
        );
    }
}
