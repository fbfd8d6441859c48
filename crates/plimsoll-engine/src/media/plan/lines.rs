//! The lines of media in the plan.

use plimsoll_memory::{Bytes, Component, PlanLine};

use super::{MediaPlan, OUTPUT_PAGE_ROWS};

impl MediaPlan {
    /// Returns the lines of encoder outputs and of media staging.
    pub(crate) fn lines(&self) -> [PlanLine; 2] {
        let (pages, rows) = (self.pages, self.pages * OUTPUT_PAGE_ROWS);
        let (tokens, batch, width) = (self.tokens, self.batch, self.width);
        let detail = format!(
            "{rows} tokens x {width} numbers in {pages} pages, {tokens} tokens an item at most; what {batch} at once are made of: {}",
            Bytes(self.patch_bytes)
        );
        let outputs = PlanLine { component: Component::EncoderOutputs, bytes: self.encoder_bytes(), detail };
        let detail =
            "upper limit, not expected use: media while they are decoded, pixels and spectrograms until requests end"
                .into();
        [outputs, PlanLine { component: Component::MediaStaging, bytes: self.media_bytes, detail }]
    }

    /// Returns the text that media add to the line of the step workspace.
    pub(crate) fn words(&self) -> String {
        let (tokens, batch) = (self.tokens, self.batch);
        format!("; or, between steps, {batch} media of up to {tokens} tokens: {}", Bytes(self.workspace as u64))
    }
}
