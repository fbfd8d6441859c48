//! The names of a draft head (MTP) in the layers after the model's last: GLM-4.5, GLM-4.7-Flash and DeepSeek-V3 in safetensors, all
//! families in GGUF.
//!
//! The canonical names are those of Qwen's heads: `mtp.fc`, `mtp.norm`, `mtp.layers.0.*`. The head shares the model's embedding and
//! output projection: DeepSeek's description of its weights says so. Copies of the two in the head's layer are not read.

use crate::directory::Entry;
use crate::names::{Names, renamed};

/// The tensors of a head besides its layer, in safetensors and in GGUF.
const NAMES: Names = &[
    ("eh_proj", "mtp.fc"),
    ("enorm", "mtp.pre_fc_norm_embedding"),
    ("hnorm", "mtp.pre_fc_norm_hidden"),
    ("shared_head.norm", "mtp.norm"),
    ("nextn.eh_proj", "mtp.fc"),
    ("nextn.enorm", "mtp.pre_fc_norm_embedding"),
    ("nextn.hnorm", "mtp.pre_fc_norm_hidden"),
    ("nextn.shared_head_norm", "mtp.norm"),
];

/// Renames the tensors of the layers from `first` on, if there are `draft` layers of a head.
pub(crate) fn rename(entries: &mut [Entry], first: u64, draft: usize) {
    for entry in entries.iter_mut().filter(|_| draft > 0) {
        if let Some(name) = canonical(&entry.name, first) {
            entry.name = name;
        }
    }
}

/// The canonical name of a tensor in a layer from `first` on. Only the first of several heads gets the names of a head.
fn canonical(name: &str, first: u64) -> Option<String> {
    let layer = name.strip_prefix("model.layers.").or_else(|| name.strip_prefix("blk."))?;
    let (layer, rest) = layer.split_once('.')?;
    let layer = layer.parse::<u64>().ok()?.checked_sub(first)?;
    let own = renamed(NAMES, rest).filter(|_| layer == 0);
    Some(own.unwrap_or_else(|| format!("mtp.layers.{layer}.{rest}")))
}

/// Returns the published name of a head's module in safetensors, which quantizations use. None if the module is not part of a head.
pub(crate) fn published(name: &str, first: usize) -> Option<String> {
    let own = NAMES.iter().find(|(_, canonical)| *canonical == name).map(|(published, _)| *published);
    let part = own.or_else(|| name.strip_prefix("mtp.layers.0."))?;
    Some(format!("model.layers.{first}.{part}"))
}

#[cfg(test)]
mod tests {
    use super::{canonical, published};

    #[test]
    fn published_names_are_those_that_become_canonical() {
        for name in
            ["mtp.fc", "mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.layers.0.mlp.gate", "mtp.layers.0.self_attn.q_proj"]
        {
            let found = published(name, 46).unwrap();
            assert_eq!(canonical(&format!("{found}.weight"), 46), Some(format!("{name}.weight")), "{found}");
        }
        assert_eq!(published("mtp.fc", 46).as_deref(), Some("model.layers.46.eh_proj"));
        assert_eq!(published("model.layers.45.mlp.gate", 46), None);
    }

    #[test]
    fn layers_behind_the_last_are_the_heads() {
        for (name, want) in [
            ("model.layers.46.eh_proj.weight", Some("mtp.fc.weight")),
            ("model.layers.46.enorm.weight", Some("mtp.pre_fc_norm_embedding.weight")),
            ("model.layers.46.hnorm.weight", Some("mtp.pre_fc_norm_hidden.weight")),
            ("model.layers.46.shared_head.norm.weight", Some("mtp.norm.weight")),
            ("model.layers.46.shared_head.head.weight", Some("mtp.layers.0.shared_head.head.weight")),
            ("model.layers.46.mlp.gate.weight", Some("mtp.layers.0.mlp.gate.weight")),
            ("blk.46.nextn.shared_head_norm.weight", Some("mtp.norm.weight")),
            ("blk.46.nextn.embed_tokens.weight", Some("mtp.layers.0.nextn.embed_tokens.weight")),
            ("model.layers.47.eh_proj.weight", Some("mtp.layers.1.eh_proj.weight")),
            ("model.layers.45.mlp.gate.weight", None),
            ("model.norm.weight", None),
        ] {
            assert_eq!(canonical(name, 46).as_deref(), want, "{name}");
        }
    }
}
