// The state of a task as the updates of the server tell it. Pure.

export class TaskState {
  constructor() {
    this.server = "";
    this.poll = 0;
    this.at = 0;
    this.task = null;
    this.rows = [];
    this.problem = null;
    this.lostAt = null; // With a problem: when it was last known that the state is that of now.
    this.origin = undefined; // Which document it is: a task that was deleted may have been created again.
  }

  // Take an update, and return the positions of the nodes that have changed; null if the update is old, or says nothing new.
  take(message) {
    const isNew = message.server !== this.server;
    if (isNew && !message.whole) return null;
    if (!isNew && message.poll < this.poll) return null;
    if (!isNew && message.poll === this.poll && !message.whole) return null;
    if (message.origin !== this.origin) this.rows = [];
    this.origin = message.origin;
    this.server = message.server;
    this.poll = message.poll;
    this.at = message.at;
    this.task = message.task;
    this.problem = message.problem;
    this.lostAt = message.lost_at;
    this.rows.length = Math.min(this.rows.length, message.count);
    const changed = [];
    for (const [key, row] of Object.entries(message.nodes)) {
      const index = Number(key);
      if (this.accepts(index, row)) {
        this.rows[index] = row;
        changed.push(index);
      }
    }
    return changed;
  }

  // An attempt with a lower number never replaces one with a higher number.
  accepts(index, row) {
    const known = this.rows[index];
    return !known || known.node_id !== row.node_id || row.attempt >= known.attempt;
  }
}
