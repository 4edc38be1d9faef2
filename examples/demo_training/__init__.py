"""How the demo pair is made: corpus → tokens → training → evaluation → folders that everybody can open."""
