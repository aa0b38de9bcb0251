/* Browsers start no workers for pages that are opened from disk. A hidden frame runs the script of the search there. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((resolve) => {
        const script = inner.document.createElement("script");
        script.src = new URL(address, location.href);
        script.onload = () => resolve(inner);
        inner.document.body.append(script);
      });
    }

    postMessage(data) {
      this.loaded.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
