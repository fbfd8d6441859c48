//! Tables of tensor names: those in files and the canonical ones.

/// Parts of a layer, and whole names outside layers: the name in the file, the canonical name. `*` stands for a number in both.
pub(crate) type Names = &'static [(&'static str, &'static str)];

/// The canonical name of `part`, a tensor of a layer or the module it belongs to, if the table has it.
pub(crate) fn renamed(names: Names, part: &str) -> Option<String> {
    names.iter().find_map(|(stored, canonical)| {
        let (number, rest) = behind(stored, part)?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{}{rest}", canonical.replace('*', number)))
    })
}

/// The number that stands for `*` in `stored`, and what follows `stored` in `part`.
fn behind<'a>(stored: &str, part: &'a str) -> Option<(&'a str, &'a str)> {
    let Some((head, tail)) = stored.split_once('*') else { return Some(("", part.strip_prefix(stored)?)) };
    let part = part.strip_prefix(head)?;
    let (number, rest) = part.split_at(part.bytes().take_while(u8::is_ascii_digit).count());
    Some((number, rest.strip_prefix(tail)?)).filter(|_| !number.is_empty())
}
