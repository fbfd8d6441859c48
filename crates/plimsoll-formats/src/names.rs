//! Tables of tensor names: the names in files and the canonical names.

/// Names of parts of a layer, and whole names outside layers: first the name in the file, then the canonical name. `*` stands for a number
/// in both.
pub(crate) type Names = &'static [(&'static str, &'static str)];

/// Returns the canonical name of `part`, if the table has it. `part` is a tensor of a layer, or its module.
pub(crate) fn renamed(names: Names, part: &str) -> Option<String> {
    names.iter().find_map(|(stored, canonical)| {
        let (number, rest) = behind(stored, part)?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{}{rest}", canonical.replace('*', number)))
    })
}

/// Returns the number at the place of `*` in `stored`, and the text after `stored` in `part`.
fn behind<'a>(stored: &str, part: &'a str) -> Option<(&'a str, &'a str)> {
    let Some((head, tail)) = stored.split_once('*') else { return Some(("", part.strip_prefix(stored)?)) };
    let part = part.strip_prefix(head)?;
    let (number, rest) = part.split_at(part.bytes().take_while(u8::is_ascii_digit).count());
    Some((number, rest.strip_prefix(tail)?)).filter(|_| !number.is_empty())
}
