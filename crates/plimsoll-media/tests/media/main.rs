//! Images, audio and video against the processors of transformers and other references.

mod audio;
#[path = "../common/mod.rs"]
mod common;
#[cfg(target_os = "linux")]
mod ffmpeg;
mod geometry;
mod images;
mod long;
mod whole_way;
mod worst_case;
