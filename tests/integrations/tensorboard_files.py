"""Reading back what a logger wrote."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(folder):
    """Tag -> {step: value} of all TensorBoard files in a folder."""
    values = {}
    for path in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(path))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            values.setdefault(tag, {}).update(
                {event.step: event.value for event in events.Scalars(tag)}
            )
    return values
