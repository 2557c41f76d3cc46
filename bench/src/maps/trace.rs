//! `--trace`: a list of operations as text.
//!
//! One operation a line: `get K`, `put K V` (insert or overwrite), `del K`, `scan K N` (up to N entries from K on).

use anyhow::{Context as _, bail, ensure};

use super::request::MapRequest;
use crate::units::{parse_u64, shorten};

/// The operation that a line means.
pub(crate) fn parse_line(line: &str) -> anyhow::Result<MapRequest> {
    let (operation, words) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let usage = match operation {
        "get" => "get K",
        "put" => "put K V",
        "del" => "del K",
        "scan" => "scan K N",
        _ => bail!("unknown operation `{}`; use `get K`, `put K V`, `del K` or `scan K N`", shorten(operation)),
    };
    let words: Vec<&str> = words.split_whitespace().collect();
    let wanted = usage.split(' ').count() - 1;
    ensure!(words.len() == wanted, "`{operation}` is written `{usage}`, and this one has {} numbers", words.len());
    let numbers = words.iter().map(|word| parse_u64(word)).collect::<Result<Vec<_>, _>>()?;
    Ok(match (operation, numbers.as_slice()) {
        ("get", [key]) => MapRequest::Get { key: *key, latest: false },
        ("put", [key, value]) => MapRequest::Put { key: *key, value: *value },
        ("del", [key]) => MapRequest::Remove { key: *key },
        ("scan", [from, limit]) => {
            let limit = u32::try_from(*limit);
            let limit = limit.with_context(|| format!("a scan asks for {} entries at most", u32::MAX))?;
            MapRequest::Scan { from: *from, limit }
        }
        _ => bail!("`{operation}` is written `{usage}`"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lines_mean_operations() {
        let parsed = |line| parse_line(line).unwrap();
        assert_eq!(parsed("get 5"), MapRequest::Get { key: 5, latest: false });
        assert_eq!(parsed("put 5  7"), MapRequest::Put { key: 5, value: 7 });
        assert_eq!(parsed("del\t5"), MapRequest::Remove { key: 5 });
        assert_eq!(parsed("scan 0 18"), MapRequest::Scan { from: 0, limit: 18 });
    }

    #[test]
    fn errors_say_why() {
        for (line, says) in [
            ("push 2", "unknown operation `push`"),
            ("get", "`get` is written `get K`, and this one has 0 numbers"),
            ("put 1", "`put K V`"),
            ("del 1 2", "2 numbers"),
            ("get 5x", "`5x`"),
            ("put 1 -2", "`-2` is not an unsigned integer"),
            ("get 18446744073709551616", "larger"),
            ("scan 1 4294967296", "4294967295 entries at most"),
        ] {
            let error = format!("{:#}", parse_line(line).unwrap_err());
            assert!(error.contains(says), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_words_are_parsed_or_refused(text in "((get|put|del|scan|#|[0-9]{1,22}|x|\\PC)[ \t]){0,5}") {
            let _ = parse_line(&text);
        }
    }
}
