//! The files of a hub repository, and the choice of files that make up a model. Module `http` fetches them.

use serde::Deserialize;

use crate::error::HubError;
use crate::http::Client;
use crate::names::{check_file, closest, url_path};
use crate::wanted::Wanted;

/// The largest listing that is read, in bytes.
const LISTING_BYTES_MAX: u64 = 32 << 20;
/// The largest file that is pulled, in bytes.
const FILE_BYTES_MAX: u64 = 4 << 40;
/// The largest file beside the weights that is pulled, in bytes; tokenizers have some ten million.
const SIDE_FILE_BYTES_MAX: u64 = 256 << 20;
/// Most names that an error message lists.
const NAMES_SHOWN_MAX: usize = 12;

/// A repository at one commit.
#[derive(Debug)]
pub(crate) struct Listing {
    repo: String,
    /// The commit, so that all files come from the same one.
    pub(crate) revision: String,
    pub(crate) files: Vec<RemoteFile>,
}

/// A file of a repository.
#[derive(Debug, Clone)]
pub(crate) struct RemoteFile {
    /// Its checked name.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// Its SHA-256; the hub has one for large files only.
    pub(crate) sha256: Option<String>,
    /// The hub's own name for the content.
    pub(crate) blob: Option<String>,
}

impl RemoteFile {
    /// Returns the required properties of the file.
    pub(crate) fn wanted(&self) -> Wanted<'_> {
        Wanted { name: &self.name, bytes: self.bytes, sha256: self.sha256.as_deref(), blob: self.blob.as_deref() }
    }
}

/// The files that answer a request.
#[derive(Debug)]
pub(crate) struct Choice {
    /// The file to answer with, or empty for the directory.
    pub(crate) path: String,
    pub(crate) files: Vec<RemoteFile>,
}

#[derive(Deserialize)]
struct ApiModel {
    sha: Option<String>,
    #[serde(default)]
    siblings: Vec<ApiFile>,
}

#[derive(Deserialize)]
struct ApiFile {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<ApiLfs>,
}

#[derive(Deserialize)]
struct ApiLfs {
    sha256: Option<String>,
    size: Option<u64>,
}

/// Fetches the list of files on the repository's main branch. Files with unfit names are left out.
pub(crate) fn list(client: &Client, repo: &str) -> Result<Listing, HubError> {
    let url = format!("{}/api/models/{}/revision/main?blobs=true", client.endpoint, url_path(repo));
    let json = client.get(&url, LISTING_BYTES_MAX)?;
    let model: ApiModel =
        serde_json::from_slice(&json).map_err(|error| HubError::BadResponse { url, why: error.to_string() })?;
    Ok(Listing::new(repo, model))
}

impl Listing {
    fn new(repo: &str, model: ApiModel) -> Self {
        let files = model.siblings.into_iter().filter_map(|file| {
            check_file(&file.rfilename).ok()?;
            let (sum, lfs_size) = file.lfs.map_or((None, None), |lfs| (lfs.sha256, lfs.size));
            Some(RemoteFile {
                name: file.rfilename,
                // A file of unknown size cannot be planned.
                bytes: lfs_size.or(file.size)?,
                sha256: sum.map(|sum| sum.to_ascii_lowercase()).filter(|sum| sum.len() == 64 && is_hexadecimal(sum)),
                blob: file.blob_id,
            })
        });
        Self {
            repo: repo.to_owned(),
            revision: model
                .sha
                .filter(|sha| (7..=64).contains(&sha.len()) && is_hexadecimal(sha))
                .unwrap_or_else(|| "main".to_owned()),
            files: files.collect(),
        }
    }

    /// Returns the URL of a file of this listing.
    pub(crate) fn url(&self, client: &Client, file: &str) -> String {
        format!("{}/{}/resolve/{}/{}", client.endpoint, url_path(&self.repo), self.revision, url_path(file))
    }

    /// Returns the file of that name.
    pub(crate) fn file(&self, name: &str) -> Result<&RemoteFile, HubError> {
        let names = || self.files.iter().map(|file| file.name.as_str());
        self.files.iter().find(|file| file.name == name).ok_or_else(|| HubError::NoSuchFile {
            repo: self.repo.clone(),
            file: name.to_owned(),
            closest: closest(name, names()).map(str::to_owned),
            available: shown(names().filter(|name| is_gguf(name))),
        })
    }

    /// Returns the files that answer a request for one file, or for the repository's only model.
    pub(crate) fn choose(&self, file: Option<&str>) -> Result<Choice, HubError> {
        let mut choice = match file {
            Some(name) if is_gguf(name) => self.gguf(self.file(name)?)?,
            Some(name) => Choice { path: name.to_owned(), files: vec![self.file(name)?.clone()] },
            None if self.is_checkpoint() => self.checkpoint(),
            None => self.gguf(self.obvious_gguf()?)?,
        };
        for file in &choice.files {
            let limit =
                if is_gguf(&file.name) || is_safetensors(&file.name) { FILE_BYTES_MAX } else { SIDE_FILE_BYTES_MAX };
            if file.bytes > limit {
                return Err(HubError::TooLarge {
                    what: format!("{} of {}", file.name, self.repo),
                    bytes: file.bytes,
                    limit,
                });
            }
        }
        // Small files first: problems of a repository show before the weights are fetched.
        choice.files.sort_by_key(|file| file.bytes);
        Ok(choice)
    }

    fn is_checkpoint(&self) -> bool {
        self.files.iter().any(|file| file.name == "config.json")
            && self.files.iter().any(|file| is_safetensors(&file.name))
    }

    /// Returns the weights and every configuration, tokenizer and template file beside them, templates by name, and the pooling and dense
    /// modules of sentence-transformers. Other subdirectories are other models.
    fn checkpoint(&self) -> Choice {
        let top_level = || self.files.iter().filter(|file| !file.name.contains('/'));
        let is_model = |file: &RemoteFile| file.name.starts_with("model");
        // Some repositories carry the same weights twice, under the names of two programs.
        let twice = top_level().any(|file| is_safetensors(&file.name) && is_model(file));
        let files = top_level().filter(|file| {
            if is_safetensors(&file.name) {
                return !(twice && file.name.starts_with("consolidated"));
            }
            [".json", ".jinja", ".txt", ".model", ".tiktoken"].iter().any(|suffix| file.name.ends_with(suffix))
        });
        let below = self.files.iter().filter(|file| {
            let template = file.name.strip_prefix("additional_chat_templates/");
            template.is_some_and(|name| name.ends_with(".jinja") && !name.contains('/')) || is_of_module(&file.name)
        });
        Choice { path: String::new(), files: files.chain(below).cloned().collect() }
    }

    /// Returns the only GGUF model, or the only one in the usual quantization.
    fn obvious_gguf(&self) -> Result<&RemoteFile, HubError> {
        let first_of_models: Vec<_> = self
            .files
            .iter()
            .filter(|file| is_gguf(&file.name) && !is_encoder(&file.name))
            .filter(|file| split_of(&file.name).is_none_or(|split| split.number == 1))
            .collect();
        let usual: Vec<_> =
            first_of_models.iter().filter(|file| file.name.to_ascii_lowercase().contains("q4_k_m")).collect();
        match (first_of_models.as_slice(), usual.as_slice()) {
            ([], _) => Err(HubError::NotAModel { repo: self.repo.clone() }),
            ([only], _) => Ok(only),
            (_, [usual]) => Ok(usual),
            _ => Err(HubError::Ambiguous {
                repo: self.repo.clone(),
                available: shown(first_of_models.iter().map(|file| file.name.as_str())),
            }),
        }
    }

    /// Returns a GGUF file, with all parts if it is one of `...-00001-of-0000N.gguf`; the first part is the answer. The file with
    /// the model's vision encoder belongs to it.
    fn gguf(&self, file: &RemoteFile) -> Result<Choice, HubError> {
        let encoder = self.encoder_of(&file.name).cloned();
        let Some(split) = split_of(&file.name) else {
            let files = std::iter::once(file.clone()).chain(encoder).collect();
            return Ok(Choice { path: file.name.clone(), files });
        };
        let names = (1..=split.count).map(|number| split.name(number));
        let files: Result<Vec<_>, _> = names.map(|name| self.file(&name).cloned()).collect();
        Ok(Choice { path: split.name(1), files: files?.into_iter().chain(encoder).collect() })
    }

    /// Returns the `mmproj` file for a model: from its folder, or for a model in a folder of its own from the one above. Of several
    /// element types, the published one is preferred.
    fn encoder_of(&self, model: &str) -> Option<&RemoteFile> {
        if is_encoder(model) {
            return None;
        }
        let folder = |name: &str| name.rsplit_once('/').map_or("", |(folder, _)| folder).to_owned();
        let own = folder(model);
        let above = split_of(model).map(|_| folder(&own));
        let place = |file: &&RemoteFile| match folder(&file.name) {
            place if place == own => Some(0),
            place if Some(&place) == above.as_ref() => Some(1),
            _ => None,
        };
        let kind = |name: &str| {
            let name = name.to_ascii_lowercase();
            ["bf16", "f16", "f32", "q8_0"].iter().position(|kind| name.contains(kind)).unwrap_or(usize::MAX)
        };
        let candidates = self.files.iter().filter(|file| is_encoder(&file.name)).filter(|file| place(file).is_some());
        candidates.min_by_key(|file| (place(file), kind(&file.name), &file.name))
    }
}

/// One file of a model that is split over several.
struct Split<'a> {
    stem: &'a str,
    number: u32,
    count: u32,
}

impl Split<'_> {
    fn name(&self, number: u32) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count)
    }
}

fn split_of(name: &str) -> Option<Split<'_>> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five_digits = |text: &str| {
        (text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse::<u32>().ok()).flatten()
    };
    let split = Split { stem, number: five_digits(number)?, count: five_digits(count)? };
    (1..=split.count).contains(&split.number).then_some(split)
}

/// Whether it is a file of a module of sentence-transformers: pooling or a dense layer.
fn is_of_module(name: &str) -> bool {
    let Some((folder, file)) = name.split_once('/') else { return false };
    let (pooling, dense) = (folder.ends_with("_Pooling"), folder.ends_with("_Dense"));
    file == "config.json" && (pooling || dense) || file == "model.safetensors" && dense
}

fn is_hexadecimal(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_hexdigit())
}

fn is_gguf(name: &str) -> bool {
    name.to_ascii_lowercase().ends_with(".gguf")
}

/// Whether a file holds the vision encoder of a GGUF model.
fn is_encoder(name: &str) -> bool {
    is_gguf(name) && name.to_ascii_lowercase().contains("mmproj")
}

fn is_safetensors(name: &str) -> bool {
    name.ends_with(".safetensors")
}

/// The first few names, for a message.
fn shown<'a>(mut names: impl Iterator<Item = &'a str>) -> String {
    let some: Vec<_> = names.by_ref().take(NAMES_SHOWN_MAX).collect();
    match (some.is_empty(), names.count()) {
        (true, _) => "no .gguf file".to_owned(),
        (false, 0) => some.join(", "),
        (false, more) => format!("{} and {more} more", some.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listing(names: &[&str]) -> Listing {
        let siblings = names.iter().map(|name| ApiFile {
            rfilename: (*name).to_owned(),
            size: Some(10),
            blob_id: None,
            lfs: None,
        });
        let model = ApiModel { sha: Some("0123456789abcdef".to_owned()), siblings: siblings.collect() };
        Listing::new("org/repo", model)
    }

    fn chosen(names: &[&str], file: Option<&str>) -> (String, Vec<String>) {
        let choice = listing(names).choose(file).unwrap();
        let mut files: Vec<_> = choice.files.into_iter().map(|file| file.name).collect();
        files.sort();
        (choice.path, files)
    }

    #[test]
    fn a_checkpoint_is_weights_and_what_belongs_to_them() {
        let (path, files) = chosen(
            &[
                "README.md",
                "config.json",
                "tokenizer.json",
                "merges.txt",
                "chat_template.jinja",
                "additional_chat_templates/tool_use.jinja",
                "additional_chat_templates/README.md",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
                "consolidated.safetensors",
                "pytorch_model.bin",
                "onnx/model.onnx",
                "onnx/config.json",
                "1_Pooling/config.json",
                "2_Dense/config.json",
                "2_Dense/model.safetensors",
                "2_Dense/pytorch_model.bin",
                "../2_Dense/model.safetensors",
                "../../evil.json",
                "/etc/evil.json",
            ],
            None,
        );
        assert_eq!(path, "");
        assert_eq!(
            files,
            [
                "1_Pooling/config.json",
                "2_Dense/config.json",
                "2_Dense/model.safetensors",
                "additional_chat_templates/tool_use.jinja",
                "chat_template.jinja",
                "config.json",
                "merges.txt",
                "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors",
                "model.safetensors.index.json",
                "tokenizer.json",
            ]
        );
    }

    #[test]
    fn the_obvious_gguf_is_found() {
        assert_eq!(chosen(&["a.gguf", "README.md"], None).0, "a.gguf");
        let several = ["m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj-f16.gguf"];
        assert_eq!(chosen(&several, None).0, "m-Q4_K_M.gguf");
        assert_eq!(chosen(&several, Some("m-Q8_0.gguf")).0, "m-Q8_0.gguf");
        let split = ["m-q4_k_m-00001-of-00002.gguf", "m-q4_k_m-00002-of-00002.gguf"];
        let (path, files) = chosen(&split, None);
        assert_eq!((path.as_str(), files.len()), ("m-q4_k_m-00001-of-00002.gguf", 2));
        assert_eq!(chosen(&split, Some(split[1])).0, split[0]);
    }

    #[test]
    fn a_gguf_model_comes_with_its_vision_encoder() {
        let names = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf"];
        assert_eq!(chosen(&names, None).1, ["m-Q4_K_M.gguf", "mmproj-BF16.gguf"]);
        assert_eq!(chosen(&names, Some("m-Q8_0.gguf")).1, ["m-Q8_0.gguf", "mmproj-BF16.gguf"]);
        assert_eq!(chosen(&names, Some("mmproj-F32.gguf")).1, ["mmproj-F32.gguf"]);
        let split = ["Q8/m-00001-of-00002.gguf", "Q8/m-00002-of-00002.gguf", "m-mmproj-f16.gguf", "other/mmproj.gguf"];
        assert_eq!(chosen(&split, Some(split[0])).1, [split[0], split[1], split[2]]);
        assert_eq!(chosen(&["sub/m.gguf", "mmproj-F16.gguf"], None).1, ["sub/m.gguf"]);
    }

    #[test]
    fn what_cannot_be_chosen_is_explained() {
        let message = |names: &[&str], file| listing(names).choose(file).unwrap_err().to_string();
        let ambiguous = message(&["a-q8_0.gguf", "b-q8_0.gguf"], None);
        assert!(ambiguous.contains("hf:org/repo:FILE") && ambiguous.contains("b-q8_0.gguf"), "{ambiguous}");
        let absent = message(&["model-q8_0.gguf"], Some("model-q8_O.gguf"));
        assert!(absent.contains("did you mean `model-q8_0.gguf`?"), "{absent}");
        assert!(message(&["README.md"], None).contains("neither"));
        assert!(message(&["m-00001-of-00002.gguf"], None).contains("no file `m-00002-of-00002.gguf`"));
        assert!(message(&["m-00001-of-99999.gguf"], None).contains("no file"));
    }

    #[test]
    fn sizes_are_bounded() {
        let mut listing = listing(&["config.json", "model.safetensors"]);
        listing.files[0].bytes = SIDE_FILE_BYTES_MAX + 1;
        assert!(matches!(listing.choose(None), Err(HubError::TooLarge { .. })));
        listing.files[0].bytes = 1;
        listing.files[1].bytes = FILE_BYTES_MAX + 1;
        assert!(matches!(listing.choose(None), Err(HubError::TooLarge { .. })));
    }

    #[test]
    fn a_hostile_revision_never_reaches_a_url() {
        for sha in ["../../x", "", "main?x", &"a".repeat(65)] {
            let model = ApiModel { sha: Some(sha.to_owned()), siblings: Vec::new() };
            assert_eq!(Listing::new("org/repo", model).revision, "main");
        }
    }
}
