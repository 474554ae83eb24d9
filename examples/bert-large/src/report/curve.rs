//! A curve of blocks, for terminals.

/// From an eighth of a line to a full one.
const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Columns before the curve: the largest and the least value.
const LABEL: usize = 8;

/// Draws values from left to right in `height` lines of at most `width` columns, each column the mean
/// of the values that fall into it. Nothing for fewer than two values.
pub fn curve(values: &[f64], width: usize, height: usize) -> Vec<String> {
    let columns = width.saturating_sub(LABEL).min(values.len());
    if columns < 2 || height == 0 {
        return Vec::new();
    }
    let means = means(values, columns);
    let (least, most) = means.iter().fold(
        (f64::INFINITY, f64::NEG_INFINITY),
        |(least, most), &mean| (least.min(mean), most.max(mean)),
    );
    let levels = 8 * height;
    let level = |mean: f64| {
        let share = match most > least {
            true => (mean - least) / (most - least),
            false => 0.0,
        };
        // The least value is an eighth high, not nothing.
        1 + eighths(share, levels - 1)
    };
    (0..height)
        .map(|row| {
            let below = 8 * (height - 1 - row);
            let cells = means
                .iter()
                .map(|&mean| match level(mean).saturating_sub(below) {
                    0 => ' ',
                    part => BLOCKS[part.min(8) - 1],
                });
            let cells: String = cells.collect();
            let label = match row {
                0 => format!("{most:>7.3}"),
                _ if row == height - 1 => format!("{least:>7.3}"),
                _ => " ".repeat(7),
            };
            format!("{label} {}", cells.trim_end())
        })
        .collect()
}

/// A bar of a share, `width` columns at most.
pub(super) fn bar(share: f64, width: usize) -> String {
    let filled = eighths(share, 8 * width);
    let mut bar = String::from(BLOCKS[7]).repeat(filled / 8);
    // Blocks that grow to the right.
    bar.extend(
        (!filled.is_multiple_of(8)).then(|| ['▏', '▎', '▍', '▌', '▋', '▊', '▉'][filled % 8 - 1]),
    );
    bar
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of a number of columns"
)]
fn eighths(share: f64, most: usize) -> usize {
    (share.clamp(0.0, 1.0) * most as f64).round() as usize
}

/// The mean of each of `count` parts, `count` at most the number of values.
fn means(values: &[f64], count: usize) -> Vec<f64> {
    (0..count)
        .map(|part| {
            let part = &values[values.len() * part / count..values.len() * (part + 1) / count];
            part.iter().sum::<f64>() / part.len() as f64
        })
        .collect()
}

/// The course of the values in `width` characters.
pub(super) fn sparkline(values: &[f64], width: usize) -> String {
    let rows = curve(values, width + LABEL, 1);
    rows.first()
        .map_or_else(String::new, |row| row.chars().skip(LABEL).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_falls_from_the_top_to_an_eighth() {
        let values = [4.0, 4.0, 3.0, 2.0, 1.0];
        // 16 levels: the values are at 16, 16, 11, 6 and 1.
        assert_eq!(curve(&values, 80, 2), ["  4.000 ██▃", "  1.000 ███▆▁"]);
        assert_eq!(sparkline(&values, 80), "██▆▃▁");
        // More values than columns.
        assert_eq!(sparkline(&[1.0, 1.0, 2.0, 2.0], 2), "▁█");
        assert_eq!(sparkline(&[3.0; 4], 4), "▁▁▁▁");
    }

    #[test]
    fn curves_and_bars_fit() {
        let values: Vec<f64> = (0..1000).map(f64::from).collect();
        for width in [0, 5, 10, 40, 200] {
            for row in curve(&values, width, 4) {
                assert!(row.chars().count() <= width, "{row}");
            }
            assert!(bar(2.0, width).chars().count() <= width);
        }
        assert_eq!(curve(&[1.0], 80, 4), Vec::<String>::new());
        assert_eq!(bar(0.5, 4), "██");
        assert_eq!(bar(0.3125, 2), "▋");
        assert_eq!(bar(0.0, 4), "");
    }
}
