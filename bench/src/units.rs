//! Numbers as people write them: sizes (`1GiB`), times (`2us`), rates (`100Gbit/s`), and how they are printed.
//!
//! A number with an unknown unit is an error that lists the known ones; nothing is guessed.

use std::time::Duration;

use anyhow::{Context as _, ensure};

/// No run lasts longer.
const DURATION_MAX: Duration = Duration::from_secs(86_400);

/// Parses decimal digits only: no sign, no underscores, no surrounding blanks.
pub(crate) fn parse_u64(token: &str) -> anyhow::Result<u64> {
    let is_integer = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_digit());
    ensure!(is_integer, "`{}` is not an unsigned integer", shorten(token));
    let largest = || format!("`{}` is larger than the largest 64-bit integer, {}", shorten(token), u64::MAX);
    token.parse().with_context(largest)
}

/// A number that fits, or an error that says what would.
pub(crate) fn number(text: &str, fits: impl Fn(f64) -> bool, wanted: &str) -> Result<f64, String> {
    text.trim().parse().ok().filter(|number| fits(*number)).ok_or_else(|| format!("it is to be {wanted}"))
}

/// Keeps an error message on one line even when the token is a megabyte of garbage.
pub(crate) fn shorten(token: &str) -> String {
    const CHARS_MAX: usize = 40;
    let mut shown: String = token.chars().take(CHARS_MAX).flat_map(char::escape_debug).collect();
    if token.chars().nth(CHARS_MAX).is_some() {
        shown.push_str("...");
    }
    shown
}

/// Splits `1.5GiB` into the number and the unit, and multiplies by what the unit stands for.
fn parse_scaled(text: &str, units: &[(&str, f64)]) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(text.len());
    let (number, unit) = (text[..digits].replace('_', ""), text[digits..].trim());
    let known = units.iter().find(|(name, _)| *name == unit);
    let &(_, scale) = known.ok_or_else(|| {
        let names: Vec<&str> = units.iter().map(|(name, _)| *name).filter(|name| !name.is_empty()).collect();
        format!("unknown unit `{}`; use one of {}", shorten(unit), names.join(", "))
    })?;
    let too_large = || format!("`{}` is too large", shorten(text));
    // Integers take the exact path: an f64 holds only 53 bits.
    if let (Ok(whole), true) = (number.parse::<u64>(), scale.fract() == 0.0) {
        return whole.checked_mul(scale as u64).ok_or_else(too_large);
    }
    let value: f64 = number.parse().map_err(|_| format!("`{}` does not start with a number", shorten(text)))?;
    let scaled = (value * scale).round();
    if scaled < u64::MAX as f64 { Ok(scaled as u64) } else { Err(too_large()) }
}

const KIB: f64 = 1024.0;

/// A size in bytes: `4096`, `64KiB`, `1GiB`, `10GB`.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let binary = [("KiB", KIB), ("MiB", KIB * KIB), ("GiB", KIB * KIB * KIB), ("TiB", KIB * KIB * KIB * KIB)];
    let short = [("K", binary[0].1), ("M", binary[1].1), ("G", binary[2].1), ("T", binary[3].1)];
    let decimal = [("", 1.0), ("B", 1.0), ("kB", 1e3), ("KB", 1e3), ("MB", 1e6), ("GB", 1e9), ("TB", 1e12)];
    parse_scaled(text, &[&binary[..], &short, &decimal].concat())
}

/// A number of things: `1000000`, `1_000_000`, `1M`, `1.5k`.
pub(crate) fn parse_count(text: &str) -> Result<u64, String> {
    let thousands = [("", 1.0), ("k", 1e3), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("B", 1e9)];
    match parse_scaled(text, &thousands)? {
        0 => Err("it is to be 1 or more".to_owned()),
        count => Ok(count),
    }
}

/// A duration above zero: `2s`, `500ms`, `1m`; a bare number is seconds.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    match parse_duration_or_zero(text)? {
        Duration::ZERO => Err("it is to be above 0".to_owned()),
        duration => Ok(duration),
    }
}

/// [`parse_duration`], or nothing.
pub(crate) fn parse_duration_or_zero(text: &str) -> Result<Duration, String> {
    let units = [("", 1e9), ("s", 1e9), ("ms", 1e6), ("us", 1e3), ("µs", 1e3), ("ns", 1.0), ("m", 6e10), ("h", 3.6e12)];
    let nanoseconds = parse_scaled(text, &units)?;
    let duration = Duration::from_nanos(nanoseconds);
    if duration > DURATION_MAX { Err("it is to be a day at most".to_owned()) } else { Ok(duration) }
}

/// A count with its noun: `1 key`, `2 keys`.
pub(crate) fn plural(count: u64, noun: &str) -> String {
    match noun.strip_suffix('y') {
        _ if count == 1 => format!("1 {noun}"),
        Some(stem) if !stem.ends_with(['a', 'e', 'o']) => format!("{count} {stem}ies"),
        _ if noun.ends_with(['s', 'x']) => format!("{count} {noun}es"),
        _ => format!("{count} {noun}s"),
    }
}

/// A time in nanoseconds: `500ns`, `2us`, `1.5ms`; a bare number is nanoseconds.
pub(crate) fn parse_nanoseconds(text: &str) -> Result<u64, String> {
    parse_scaled(text, &[("", 1.0), ("ns", 1.0), ("us", 1e3), ("µs", 1e3), ("ms", 1e6), ("s", 1e9)])
}

/// A rate in bytes a second: `12500000000`, `10GB/s`, `100Gbit/s`.
pub(crate) fn parse_bytes_per_second(text: &str) -> Result<u64, String> {
    let bytes =
        [("", 1.0), ("B/s", 1.0), ("MB/s", 1e6), ("GB/s", 1e9), ("MiB/s", KIB * KIB), ("GiB/s", KIB * KIB * KIB)];
    match parse_scaled(text, &[&bytes[..], &[("Mbit/s", 125e3), ("Gbit/s", 125e6)]].concat())? {
        0 => Err("a rate must be more than zero".to_owned()),
        rate => Ok(rate),
    }
}

/// Three significant digits with a unit: `870ns`, `2.15us`, `1.03s`.
pub(crate) fn show_nanoseconds(nanoseconds: u64) -> String {
    match nanoseconds {
        0..1_000 => format!("{nanoseconds}ns"),
        1_000..1_000_000 => format!("{}us", three_digits(nanoseconds as f64 / 1e3)),
        1_000_000..1_000_000_000 => format!("{}ms", three_digits(nanoseconds as f64 / 1e6)),
        _ => format!("{}s", three_digits(nanoseconds as f64 / 1e9)),
    }
}

/// Three significant digits with a decimal prefix: `950`, `12.3k`, `1.23M`.
pub(crate) fn show_count(count: f64) -> String {
    match count {
        c if !c.is_finite() => "-".to_owned(),
        c if c < 999.5 => three_digits(c),
        c if c < 999.5e3 => format!("{}k", three_digits(c / 1e3)),
        c if c < 999.5e6 => format!("{}M", three_digits(c / 1e6)),
        c => format!("{}G", three_digits(c / 1e9)),
    }
}

/// At most four characters: `0.87`, `1.62`, `36.0`, `123`, `1.2k`, `60M`.
pub(crate) fn show_short(value: Option<f64>) -> String {
    let Some(value) = value.filter(|value| value.is_finite()) else { return "-".to_owned() };
    match value {
        v if v < 999.5 => three_digits(v),
        v => {
            let (mut v, mut prefix) = (v / 1e3, 0);
            while v >= 999.5 && prefix < 3 {
                (v, prefix) = (v / 1e3, prefix + 1);
            }
            let digits = usize::from(v < 9.95);
            format!("{v:.digits$}{}", ["k", "M", "G", "T"][prefix])
        }
    }
}

/// Three significant digits with a binary prefix: `512 B`, `1.50 MiB`.
pub(crate) fn show_bytes(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.2} {}", units[unit]) }
}

fn three_digits(value: f64) -> String {
    match value {
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

/// The size of a page.
pub(crate) fn parse_page_bytes(text: &str) -> Result<u32, String> {
    let bytes = parse_bytes(text)?;
    let fits = bytes.is_power_of_two() && (64..=65536).contains(&bytes);
    if fits { Ok(bytes as u32) } else { Err("it is to be a power of two from 64 to 65536".to_owned()) }
}

/// How full a bulk load makes each page.
pub(crate) fn parse_fill(text: &str) -> Result<f64, String> {
    number(text, |fill| (0.1..=1.0).contains(&fill), "from 0.1 to 1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_digits_only() {
        assert_eq!(parse_u64("18446744073709551615").unwrap(), u64::MAX);
        assert!(parse_u64("18446744073709551616").unwrap_err().to_string().contains("larger"));
        for bad in ["", "+1", "-1", "1_000", "0x10", "1.5", "١"] {
            assert!(parse_u64(bad).unwrap_err().to_string().contains("not an unsigned integer"), "{bad}");
        }
    }

    #[test]
    fn sizes_times_and_rates() {
        assert_eq!(parse_bytes("1GiB"), Ok(1 << 30));
        assert_eq!(parse_bytes("1.5 KiB"), Ok(1536));
        assert_eq!(parse_bytes("1_000"), Ok(1000));
        assert_eq!(parse_bytes("18446744073709551615"), Ok(u64::MAX));
        assert!(parse_bytes("99999999999TiB").is_err());
        assert!(parse_bytes("GiB").is_err());
        assert!(parse_bytes("1 parsec").unwrap_err().contains("KiB"));
        assert_eq!((parse_count("1M"), parse_count("1.5k"), parse_count("7")), (Ok(1_000_000), Ok(1500), Ok(7)));
        assert!(parse_count("0").is_err() && parse_count("1x").unwrap_err().contains("k, K, M"));
        let seconds = |text| parse_duration(text).map(|duration| duration.as_secs_f64());
        assert_eq!(
            (seconds("2s"), seconds("0.5"), seconds("500ms"), seconds("2m")),
            (Ok(2.0), Ok(0.5), Ok(0.5), Ok(120.0))
        );
        assert!(
            seconds("0").is_err() && seconds("NaN").is_err() && seconds("1e300").is_err() && seconds("48h").is_err()
        );
        assert_eq!(parse_duration_or_zero("0"), Ok(Duration::ZERO));
        assert_eq!((parse_page_bytes("4KiB"), parse_page_bytes("64")), (Ok(4096), Ok(64)));
        assert!(parse_page_bytes("1000").is_err());
        assert_eq!(parse_nanoseconds("2us"), Ok(2000));
        assert_eq!(parse_nanoseconds("500ns"), Ok(500));
        assert_eq!(parse_nanoseconds("750"), Ok(750));
        assert_eq!(parse_nanoseconds("1.5ms"), Ok(1_500_000));
        assert!(parse_nanoseconds("-1us").is_err());
        assert_eq!(parse_bytes_per_second("100Gbit/s"), Ok(12_500_000_000));
        assert!(parse_bytes_per_second("0").is_err());
    }

    #[test]
    fn printing() {
        assert_eq!(show_nanoseconds(870), "870ns");
        assert_eq!(show_nanoseconds(2_150), "2.15us");
        assert_eq!(show_nanoseconds(99_960), "100us");
        assert_eq!(show_count(1_234_567.0), "1.23M");
        assert_eq!(show_count(0.0), "0.00");
        assert_eq!(show_count(f64::NAN), "-");
        let short = |value| show_short(Some(value));
        let shown = [0.0, 1.62, 36.04, 999.4, 999.6, 9_960.0, 12_345.0, 59_999_999.0, 1e15].map(short);
        assert_eq!(shown, ["0.00", "1.62", "36.0", "999", "1.0k", "10k", "12k", "60M", "1000T"]);
        assert_eq!(show_short(None), "-");
        assert_eq!(
            (plural(1, "key"), plural(2, "key"), plural(0, "entry")),
            ("1 key".into(), "2 keys".into(), "0 entries".into())
        );
        assert_eq!((plural(2, "compute process"), plural(2, "box")), ("2 compute processes".into(), "2 boxes".into()));
        assert_eq!(show_bytes(512), "512 B");
        assert_eq!(show_bytes(1 << 20), "1.00 MiB");
    }

    #[test]
    fn long_tokens_are_cut() {
        assert!(shorten(&"x".repeat(1000)).len() < 60);
        assert_eq!(shorten("a\nb"), "a\\nb");
    }
}
